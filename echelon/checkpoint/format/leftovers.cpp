#include "echelon/checkpoint/format/leftovers.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <csignal>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace echelon {
namespace {

namespace fs = std::filesystem;

bool lock(int file) {
  return ::flock(file, LOCK_EX | LOCK_NB) == 0;
}

/// Removes the number at the front of `text`.
std::optional<pid_t> take_number(std::string_view& text) {
  pid_t number = 0;
  const auto read =
      std::from_chars(text.data(), text.data() + text.size(), number);
  if (read.ec != std::errc() || number <= 0) return {};
  text.remove_prefix(static_cast<size_t>(read.ptr - text.data()));
  return number;
}

/// The process of "part-4711" and "part-4711-0", given what follows "part-".
std::optional<pid_t> process_of(std::string_view text) {
  const auto process = take_number(text);
  if (text.empty()) return process;
  if (!text.starts_with('-')) return {};
  text.remove_prefix(1);
  const bool digits = !text.empty() && text.find_first_not_of("0123456789") ==
                                           std::string_view::npos;
  return digits ? process : std::nullopt;
}

bool is_alive(pid_t process) {
  return ::kill(process, 0) == 0 || errno != ESRCH;
}

void remove_unless_claimed(const fs::path& path) {
  const int file =
      ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (file < 0) return;
  std::error_code ignored;
  if (lock(file)) fs::remove_all(path, ignored);
  ::close(file);
}

}  // namespace

void claim_part(int file) noexcept {
  lock(file);
}

void remove_leftovers(const fs::path& parts) noexcept try {
  const std::string start = parts.filename().string();
  const fs::path folder = parts.has_parent_path() ? parts.parent_path() : ".";
  std::vector<fs::path> left;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(start)) continue;
    const auto process =
        process_of(std::string_view(name).substr(start.size()));
    if (process && !is_alive(*process)) left.push_back(entry.path());
  }
  for (const auto& path : left) remove_unless_claimed(path);
} catch (const std::exception&) {
  // Whoever writes into a folder that cannot be listed reports the error.
}

}  // namespace echelon
