// A file descriptor with an owner.
#pragma once

#include <unistd.h>

#include <utility>

namespace echelon {

/// Closes the file when it is destroyed or takes another one. -1: no file.
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    other.close();
    return *this;
  }
  ~FileDescriptor() { close(); }

  int fd() const { return fd_; }
  /// Gives the file away.
  int release() { return std::exchange(fd_, -1); }
  bool is_open() const { return fd_ >= 0; }
  void close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

 private:
  int fd_;
};

}  // namespace echelon
