#include "echelon/checkpoint/format/new_file.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "echelon/checkpoint/format/leftovers.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {

NewFile::NewFile(std::string path, uint64_t bytes, Under under)
    : path_(std::move(path)), bytes_(bytes) {
  folder_ = std::filesystem::path(path_).parent_path().string();
  if (folder_.empty()) folder_ = ".";
  create(under);
  if (::fallocate(fd_, 0, 0, static_cast<off_t>(bytes)) != 0 &&
      errno != EOPNOTSUPP && errno != ENOSYS && errno != EINTR) {
    fail("making room for it", errno);
  }
}

void NewFile::create(Under under) {
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

void NewFile::start_writing() {
  if (direct_) return;
  // A hint: finish() reports any error.
  ::sync_file_range(fd_, started_, written_ - started_, SYNC_FILE_RANGE_WRITE);
  started_ = written_;
}

void NewFile::finish() {
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
      "{}: {} failed: {}; it needs {} bytes, {} are free in {}; nothing was "
      "left behind",
      path_, doing, std::strerror(error), bytes_, free, folder_));
}

}  // namespace echelon
