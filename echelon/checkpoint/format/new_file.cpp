// A file is created exclusively, its room reserved, its bytes appended, then
// synced and closed; a file `beside` is renamed to its path at the end, and the
// folder synced. `name_` is the name to remove if the object goes before that.
// A part is locked by its writer, so whoever finds a part that is named after a
// dead process and not locked removes it.
//
// Direct and buffered writes may alternate. append_direct() falls back to
// buffered writes for good once the file system refuses.
#include "echelon/checkpoint/format/new_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstring>
#include <exception>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "echelon/error.h"
#include "echelon/text/format.h"

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

NewFile::NewFile(std::string path, uint64_t bytes, Under under)
    : path_(std::move(path)), bytes_(bytes) {
  folder_ = fs::path(path_).parent_path().string();
  if (folder_.empty()) folder_ = ".";
  create(under);
  if (::fallocate(fd_, 0, 0, static_cast<off_t>(bytes)) != 0 &&
      errno != EOPNOTSUPP && errno != ENOSYS && errno != EINTR) {
    fail("making room for it", errno);
  }
}

void NewFile::create(Under under) {
  if (under == Under::over) {
    fd_ = ::open(path_.c_str(), O_WRONLY | O_CLOEXEC);
    if (fd_ < 0) fail("opening it", errno);
    over_ = refused_direct_ = true;
    return;
  }
  if (under == Under::beside) remove_leftovers(path_ + ".part-");
  for (int attempt = 0; fd_ < 0; ++attempt) {
    name_ = path_;
    if (under == Under::beside) {
      name_ += format(".part-{}-{}", ::getpid(), attempt);
    }
    fd_ = ::open(name_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd_ >= 0) {
      if (under == Under::beside) claim_part(fd_);
      return;
    }
    const bool again =
        under == Under::beside && errno == EEXIST && attempt < 1000;
    if (!again) {
      name_.clear();
      fail("creating it", errno);
    }
  }
}

bool NewFile::set_direct(bool on) {
  if (direct_ == on) return true;
  const int flags = ::fcntl(fd_, F_GETFL);
  const int changed = on ? flags | O_DIRECT : flags & ~O_DIRECT;
  if (flags < 0 || ::fcntl(fd_, F_SETFL, changed) != 0) return false;
  direct_ = on;
  return true;
}

void NewFile::append_direct(const void* data, size_t bytes) {
  if (!refused_direct_ && !direct_) {
    refused_direct_ = !set_direct(true);
    if (direct_) give_back_room();
  }
  append_as_set(data, bytes);
}

// A direct write into room that is only reserved waits until the file system
// has recorded that it is used: 4 ms each on ext4, much longer than the write.
void NewFile::give_back_room() {
  // Where it fails, writing is slow, not wrong.
  [[maybe_unused]] const int given = ::ftruncate(fd_, written_);
}

void NewFile::append(const void* data, size_t bytes) {
  if (!set_direct(false)) fail("writing it", errno);
  append_as_set(data, bytes);
}

void NewFile::append_as_set(const void* data, size_t bytes) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written =
        ::write(fd_, from, std::min<size_t>(bytes, size_t{1} << 30));
    if (written < 0 && errno == EINTR) continue;
    // The file system refuses direct writes only now, or wants other sizes.
    if (written < 0 && errno == EINVAL && direct_ && set_direct(false)) {
      refused_direct_ = true;
      continue;
    }
    if (written <= 0) fail("writing it", written == 0 ? ENOSPC : errno);
    from += written;
    bytes -= static_cast<size_t>(written);
    written_ += written;
  }
}

void NewFile::rewrite_start(const void* data, size_t bytes) {
  if (!set_direct(false)) fail("writing it", errno);
  if (::lseek(fd_, 0, SEEK_SET) != 0) fail("writing it", errno);
  append_as_set(data, bytes);
  written_ -= static_cast<int64_t>(bytes);
  if (::lseek(fd_, 0, SEEK_END) < 0) fail("writing it", errno);
}

void NewFile::start_writing() {
  if (direct_) return;
  // A hint: finish() reports any error.
  ::sync_file_range(fd_, started_, written_ - started_, SYNC_FILE_RANGE_WRITE);
  started_ = written_;
}

void NewFile::finish() {
  if (over_ && ::ftruncate(fd_, written_) != 0) fail("shortening it", errno);
  if (::fsync(fd_) != 0) fail("syncing it", errno);
  if (::close(std::exchange(fd_, -1)) != 0) fail("closing it", errno);
}

void NewFile::move_into_place() {
  finish();
  if (::rename(name_.c_str(), path_.c_str()) != 0) fail("renaming it", errno);
  keep();
  const int folder =
      ::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return;  // a folder may be writable but not readable
  const int synced = ::fsync(folder);
  const int error = errno;
  ::close(folder);
  if (synced != 0 && error != EINVAL) fail("syncing its folder", error);
}

void NewFile::discard() noexcept {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  if (!name_.empty()) ::unlink(name_.c_str());
  name_.clear();
}

void NewFile::fail(const std::string& doing, int error) {
  discard();
  struct statvfs disk = {};
  std::string free = "unknown";
  if (::statvfs(folder_.c_str(), &disk) == 0) {
    free = std::to_string(static_cast<uint64_t>(disk.f_bavail) * disk.f_frsize);
  }
  throw CheckpointError(format(
      "{}: {} failed: {}; it needs {} bytes, {} are free in {}{}", path_, doing,
      std::strerror(error), bytes_, free, folder_,
      over_ ? "" : "; nothing was left behind"));
}

}  // namespace echelon
