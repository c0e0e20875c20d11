#include "echelon/authentication/token.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>

#include "echelon/error.h"
#include "echelon/text/file_descriptor.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"

namespace echelon::authentication {
namespace {

constexpr const char* kMake =
    "`(umask 077; openssl rand -hex 32 > FILE)` makes one";

template <typename... Values>
[[noreturn]] void refuse(
    std::type_identity_t<detail::FormatPattern<sizeof...(Values)>> why,
    const Values&... values) {
  throw ConfigError("[launch] " + format(why, values...));
}

// A FIFO would wait for a writer.
FileDescriptor open_file(const std::string& path, int flags) {
  return FileDescriptor(
      open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK, 0600));
}

void check_owner(const std::string& path, int fd) {
  struct stat info {};
  if (fstat(fd, &info) != 0) {
    refuse("the token file {}: {}", path, std::strerror(errno));
  }
  if (S_ISDIR(info.st_mode)) {
    refuse("the token file {} is a folder; give the file in it", path);
  }
  if (!S_ISREG(info.st_mode)) {
    refuse("the token file {} is not a file; {}", path, kMake);
  }
  if (info.st_uid != geteuid()) {
    refuse(
        "the token file {} belongs to user {}, who knows the token then, and "
        "this is user {}; copy it to a file of your own, with mode 0600",
        path, info.st_uid, geteuid());
  }
  if ((info.st_mode & 077) != 0) {
    refuse(
        "the token file {} has mode {:o}, so that others can read or write it; "
        "`chmod 600 {}` keeps them out, and a new token is needed if somebody "
        "may have read this one",
        path, info.st_mode & 07777, path);
  }
}

/// Nothing when there is no such file.
std::optional<Key> read_file(const std::string& path) {
  const FileDescriptor file = open_file(path, O_RDONLY);
  if (!file.is_open()) {
    if (errno == ENOENT) return std::nullopt;
    refuse("cannot read the token file {}: {}", path, std::strerror(errno));
  }
  check_owner(path, file.fd());
  std::string text(2 * Key::kBytes + 2, '\0');
  const ssize_t size = read(file.fd(), text.data(), text.size());
  if (size < 0) {
    refuse("cannot read the token file {}: {}", path, std::strerror(errno));
  }
  text.resize(static_cast<size_t>(size));
  if (text.empty()) refuse("the token file {} is empty; {}", path, kMake);
  if (text.back() == '\n') text.pop_back();
  const auto key = Key::from_hex(text);
  if (!key) {
    refuse(
        "the token file {} has no token in it: a token is {} hexadecimal "
        "digits; {}",
        path, 2 * Key::kBytes, kMake);
  }
  return key;
}

// Another launcher may make the file at the same time, so it is written under a
// name of its own and gets its name when it is whole: the first one wins. False
// when another one was first.
bool make_file(const std::string& path) {
  const auto fail = [&](const char* what) {
    refuse(
        "cannot make the token file {}: {}: {}; make one elsewhere, with "
        "`(umask "
        "077; openssl rand -hex 32 > FILE)`, and give it with --token-file",
        path, what, std::strerror(errno));
  };
  const auto folder = std::filesystem::path(path).parent_path();
  std::error_code error;
  std::filesystem::create_directories(folder.parent_path(), error);
  if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) fail("its folder");
  const std::string part =
      format("{}.{}", path, Key::random().to_hex().substr(0, 16));
  const std::string text = Key::random().to_hex() + "\n";
  {
    const FileDescriptor file = open_file(part, O_WRONLY | O_CREAT | O_EXCL);
    if (!file.is_open()) fail("opening");
    if (write(file.fd(), text.data(), text.size()) !=
            static_cast<ssize_t>(text.size()) ||
        fsync(file.fd()) != 0) {
      const int reason = errno;
      unlink(part.c_str());
      errno = reason;
      fail("writing");
    }
  }
  const int linked = link(part.c_str(), path.c_str());
  const int reason = errno;
  unlink(part.c_str());
  errno = reason;
  if (linked != 0 && reason != EEXIST) fail("naming");
  return linked == 0;
}

std::string own_file() {
  const auto folder = configuration_folder();
  if (folder.empty()) {
    refuse(
        "several hosts need a token, and neither XDG_CONFIG_HOME nor HOME is "
        "set; give its file with --token-file");
  }
  return (folder / "token").string();
}

}  // namespace

Token read_token(const std::string& file) {
  if (!file.empty()) {
    const auto key = read_file(file);
    if (!key) refuse("there is no token file {}; {}", file, kMake);
    return {*key, "the file " + file};
  }
  if (const char* text = std::getenv(kTokenVariable)) {
    const auto key = Key::from_hex(text);
    if (!key) {
      refuse(
          "the variable ECHELON_TOKEN is not a token: that is {} hexadecimal "
          "digits, as `openssl rand -hex 32` makes them",
          2 * Key::kBytes);
    }
    return {*key, "the variable ECHELON_TOKEN"};
  }
  const std::string own = own_file();
  auto key = read_file(own);
  const bool made = !key && make_file(own);
  if (!key) key = read_file(own);
  if (!key) refuse("the token file {} went away", own);
  return {*key, "the file " + own, made};
}

bool have_token(const std::string& file) {
  std::error_code error;
  return !file.empty() || std::getenv(kTokenVariable) != nullptr ||
         std::filesystem::exists(configuration_folder() / "token", error);
}

}  // namespace echelon::authentication
