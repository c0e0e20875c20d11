#include "echelon/cli/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <ostream>
#include <sstream>
#include <string_view>
#include <utility>

#include "echelon/text/format.h"
#include "echelon/text/table.h"
#include "echelon/text/units.h"

namespace echelon::cli {
namespace {

std::string coloured(bool on, const char* colour, const std::string& text) {
  return on && !text.empty() ? colour + text + "\033[0m" : text;
}

}  // namespace

std::string Style::bold(const std::string& text) const {
  return coloured(colours, "\033[1m", text);
}

std::string Style::dim(const std::string& text) const {
  return coloured(colours, "\033[2m", text);
}

std::string Style::red(const std::string& text) const {
  return coloured(colours, "\033[31;1m", text);
}

bool has_colours(int stream) {
  const char* no = std::getenv("NO_COLOR");
  const char* term = std::getenv("TERM");
  return ::isatty(stream) == 1 && (no == nullptr || *no == '\0') &&
         term != nullptr && std::string_view(term) != "dumb";
}

Style terminal_style(size_t otherwise) {
  winsize size{};
  const bool known = ::ioctl(1, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return {
      .colours = has_colours(1), .columns = known ? size.ws_col : otherwise};
}

void print_table(const Rows& rows, const Style& style, std::ostream& out) {
  const std::string text = aligned(rows);
  const size_t end = text.find('\n');
  out << style.bold(text.substr(0, end)) << text.substr(end);
}

void print_json(const nlohmann::ordered_json& json, std::ostream& out) {
  using Json = nlohmann::ordered_json;
  out << json.dump(2, ' ', false, Json::error_handler_t::replace) << "\n";
}

nlohmann::ordered_json json_number(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

std::string counted(int64_t number, const std::string& what) {
  const char* plural = what.ends_with("ch") ? "es" : "s";
  return format("{} {}{}", number, what, number == 1 ? "" : plural);
}

std::string number_text(double value) {
  return format("{:.4g}", value);
}

std::string plain(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < ' ' || c == 0x7F) c = '?';
  }
  return text;
}

std::vector<std::string> split(const std::string& text, char end) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, end);) parts.push_back(part);
  return parts;
}

ReadingProgress::ReadingProgress(std::string what, int64_t total_bytes)
    : what_(std::move(what)),
      total_bytes_(total_bytes),
      on_terminal_(::isatty(2) == 1),
      next_(begin_ + std::chrono::milliseconds(on_terminal_ ? 500 : 10'000)) {}

ReadingProgress::~ReadingProgress() {
  if (shown_ && on_terminal_) std::fputs("\r\033[K", stderr);
}

void ReadingProgress::operator()(int64_t done_bytes) {
  const auto now = Clock::now();
  if (now < next_) return;
  next_ = now + std::chrono::milliseconds(on_terminal_ ? 100 : 10'000);
  shown_ = true;
  const auto done = static_cast<double>(done_bytes);
  const double seconds = std::chrono::duration<double>(now - begin_).count();
  const double share =
      total_bytes_ > 0 ? done / static_cast<double>(total_bytes_) : 1;
  const std::string line = format(
      "{}: {} of {} ({:.0f} %), {}/s", what_, format_bytes(done_bytes),
      format_bytes(total_bytes_), 100 * share, format_bytes(done / seconds));
  std::fprintf(stderr, on_terminal_ ? "\r%s\033[K" : "%s\n", line.c_str());
  std::fflush(stderr);
}

}  // namespace echelon::cli
