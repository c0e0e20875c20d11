#include "echelon/text/text_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <system_error>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

[[noreturn]] void fail(const std::filesystem::path& path, int error) {
  throw Error(format(
      "cannot write {}: {}; an earlier file there is unchanged", path.string(),
      std::strerror(error)));
}

}  // namespace

int write_all(int file, std::string_view& text) {
  while (!text.empty()) {
    const ssize_t count = ::write(file, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return count == 0 ? ENOSPC : errno;
    text.remove_prefix(static_cast<size_t>(count));
  }
  return 0;
}

void write_file_atomically(
    const std::filesystem::path& path, std::string_view text) {
  std::error_code ignored;
  if (path.has_parent_path()) {
    std::filesystem::create_directories(path.parent_path(), ignored);
  }
  auto partial = path;
  partial += format(".{}.partial", ::getpid());
  const int file =
      ::open(partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0) fail(path, errno);
  int error = write_all(file, text);
  if (::close(file) != 0 && error == 0) error = errno;
  if (error == 0 && ::rename(partial.c_str(), path.c_str()) != 0) {
    error = errno;
  }
  if (error != 0) {
    ::unlink(partial.c_str());
    fail(path, error);
  }
}

std::filesystem::path configuration_folder() {
  // The convention: a path that is not absolute counts as not set.
  const char* set = std::getenv("XDG_CONFIG_HOME");
  if (set && std::filesystem::path(set).is_absolute()) {
    return std::filesystem::path(set) / "echelon";
  }
  const char* home = std::getenv("HOME");
  if (!home || *home == '\0') return {};
  return std::filesystem::path(home) / ".config" / "echelon";
}

std::filesystem::path cache_folder() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::filesystem::path(value == nullptr ? "" : value);
  };
  if (const auto own = variable("ECHELON_CACHE"); !own.empty()) return own;
  if (const auto user = variable("XDG_CACHE_HOME"); !user.empty()) {
    return user / "echelon";
  }
  const auto home = variable("HOME");
  return home.empty() ? home : home / ".cache" / "echelon";
}

std::string read_text_file(const std::filesystem::path& path) {
  const auto fail = [&](const std::string& why) -> DataError {
    return DataError(format("cannot read {}: {}", path.string(), why));
  };
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) throw fail("it is a folder");
  // A pipe or a device may never end, or wait for a writer.
  if (std::filesystem::exists(path, error) &&
      !std::filesystem::is_regular_file(path, error)) {
    throw fail("it is no regular file");
  }
  std::ifstream in(path, std::ios::binary);
  if (!in) throw fail(std::strerror(errno));
  std::ostringstream text;
  text << in.rdbuf();
  return std::move(text).str();
}

}  // namespace echelon
