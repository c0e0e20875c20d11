#include "echelon/cli/checkpoint_text.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <iterator>
#include <utility>

#include "echelon/cli/findings.h"
#include "echelon/cli/help.h"
#include "echelon/error.h"

namespace echelon::cli {
namespace {

std::string in_colour(const char* colour, const std::string& text) {
  return has_colours(1) && !text.empty() ? colour + text + "\033[0m" : text;
}

}  // namespace

CheckpointManifest read_manifest(const std::filesystem::path& checkpoint) {
  const auto path = (checkpoint / "manifest.json").string();
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file) throw CheckpointError(path + ": cannot be read");
  return parse_manifest(text, path);
}

int64_t total_bytes(const CheckpointManifest& manifest) {
  int64_t bytes = 0;
  for (const auto& file : manifest.files) bytes += file.bytes;
  return bytes;
}

std::string saved_at(const std::filesystem::path& checkpoint) {
  struct stat status = {};
  const auto path = checkpoint / "manifest.json";
  if (::stat(path.c_str(), &status) != 0) return "?";
  std::tm time = {};
  ::localtime_r(&status.st_mtime, &time);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S", &time);
  return text;
}

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.4g", value);
  return text;
}

std::string counted(int64_t number, const std::string& what) {
  return std::to_string(number) + " " + what + (number == 1 ? "" : "s");
}

std::string plain(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < ' ' || c == 0x7F) c = '?';
  }
  return text;
}

nlohmann::ordered_json json_number(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

std::string bold(const std::string& text) {
  return in_colour("\033[1m", text);
}

std::string dim(const std::string& text) {
  return in_colour("\033[2m", text);
}

std::string red(const std::string& text) {
  return in_colour("\033[31;1m", text);
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
  std::fprintf(
      stderr, "%s%s: %s of %s (%.0f %%), %s/s%s", on_terminal_ ? "\r" : "",
      what_.c_str(), bytes_text(done).c_str(),
      bytes_text(static_cast<double>(total_bytes_)).c_str(), 100 * share,
      bytes_text(done / seconds).c_str(), on_terminal_ ? "\033[K" : "\n");
  std::fflush(stderr);
}

}  // namespace echelon::cli
