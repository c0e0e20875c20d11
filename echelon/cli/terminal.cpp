#include "echelon/cli/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>
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

bool locale_is_utf8() {
  // The first that is set decides, as in setlocale().
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const char* value = std::getenv(name);
    if (value == nullptr || *value == '\0') continue;
    const std::string_view locale = value;
    for (const char* utf8 : {"UTF-8", "utf-8", "UTF8", "utf8"}) {
      if (locale.find(utf8) != std::string_view::npos) return true;
    }
    return false;
  }
  return false;
}

// Replaces characters beyond ASCII on their way to another buffer.
class AsciiBuffer : public std::streambuf {
 public:
  explicit AsciiBuffer(std::streambuf* to) : to_(to) {}

 protected:
  int overflow(int c) override {
    if (c == traits_type::eof()) return 0;
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x80) return to_->sputc(static_cast<char>(c));
    if (byte >= 0xC0) character_.clear();
    character_ += static_cast<char>(c);
    const auto first = static_cast<unsigned char>(character_.front());
    const size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
    if (character_.size() < length) return c;
    for (const char one : spelling(character_)) to_->sputc(one);
    character_.clear();
    return c;
  }
  int sync() override { return to_->pubsync(); }

 private:
  static std::string_view spelling(std::string_view character) {
    constexpr std::pair<std::string_view, std::string_view> kSpellings[] = {
        {"…", "..."}, {"·", "-"},  {"µ", "u"},     {"×", "x"},  {"–", "-"},
        {"—", "-"},   {"→", "->"}, {"≤", "<="},    {"≥", ">="}, {"█", "#"},
        {"░", "."},   {"▒", ":"},  {"▓", "%"},     {"▁", "_"},  {"▂", "."},
        {"▃", "-"},   {"▄", "-"},  {"▅", "="},     {"▆", "="},  {"▇", "#"},
        {"─", "-"},   {"│", "|"},  {"\u00A0", " "}};
    for (const auto& [from, to] : kSpellings) {
      if (character == from) return to;
    }
    return "?";
  }

  std::streambuf* to_;
  std::string character_;
};

}  // namespace

AsciiOutput::AsciiOutput() {
  if (locale_is_utf8()) return;
  if (::isatty(1) == 1) {
    out_ = std::make_unique<AsciiBuffer>(cout_ = std::cout.rdbuf());
    std::cout.rdbuf(out_.get());
  }
  if (::isatty(2) == 1) {
    err_ = std::make_unique<AsciiBuffer>(cerr_ = std::cerr.rdbuf());
    std::cerr.rdbuf(err_.get());
  }
}

AsciiOutput::~AsciiOutput() {
  std::cout.flush();
  if (cout_ != nullptr) std::cout.rdbuf(cout_);
  if (cerr_ != nullptr) std::cerr.rdbuf(cerr_);
}

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

std::string prose(const std::string& text, size_t indent, size_t last) {
  std::string quoted = text;
  for (size_t begin = 0; (begin = quoted.find('`', begin)) != quoted.npos;) {
    const size_t end = quoted.find('`', begin + 1);
    if (end == quoted.npos) break;
    quoted[begin] = quoted[end] = '\'';
    begin = end + 1;
  }
  return wrapped(quoted, indent, last);
}

std::string fitted(const Rows& rows, size_t last, bool headed) {
  const std::string table = aligned(rows);
  const auto lines = split(table);
  const bool fits = std::ranges::all_of(
      lines, [&](const std::string& line) { return columns(line) <= last; });
  if (fits) return table;
  std::string text;
  for (size_t i = headed ? 1 : 0; i < rows.size(); ++i) {
    const auto& row = rows[i];
    const size_t indent = std::min(row[0].find_first_not_of(' '), size_t{8});
    std::string line = row[0].substr(indent);
    for (size_t cell = 1; cell < row.size(); ++cell) {
      if (row[cell].empty()) continue;
      line += cell == 1 ? ": " : ", ";
      if (headed && !rows[0][cell].empty()) line += rows[0][cell] + " ";
      line += row[cell];
    }
    text += std::string(indent, ' ') + wrapped(line, indent + 2, last) + "\n";
  }
  return text;
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

std::string number_text(double value) {
  return format("{:.4g}", value);
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
