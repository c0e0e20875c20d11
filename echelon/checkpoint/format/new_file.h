// A file that is whole or not there. For what writes a run's files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace echelon {

/// Removed again unless keep() or move_into_place() was reached. What the disk
/// refuses is a CheckpointError: path, what was done, bytes needed, bytes free.
class NewFile {
 public:
  /// at_path: under its own name, which must not be taken.
  /// beside: under another one until move_into_place() replaces what is there.
  /// Those that processes which were killed left are removed.
  enum class Under { at_path, beside };

  /// Makes room for `bytes` in all: a disk that is too full is found before
  /// anything is written. Not every file system can say; then append() will.
  NewFile(std::string path, uint64_t bytes, Under under);
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;
  ~NewFile() { discard(); }

  void append(const void* data, size_t bytes);
  /// As append(), past the system's cache where the file system lets us: that
  /// costs no copy, and what others keep there stays. At an offset, from an
  /// address and of a size that kDirectBytes divides. Gives back the room that
  /// was made: a disk which others fill meanwhile is found by the write that
  /// meets it.
  void append_direct(const void* data, size_t bytes);
  static constexpr size_t kDirectBytes = 4096;
  /// Lets the disk begin with what was appended, so that finish() waits less.
  void start_writing();
  /// Everything is on the disk, the folder's entry excepted; the file is
  /// closed.
  void finish();
  void keep() noexcept { name_.clear(); }
  /// finish(), rename to the path, and the folder's entry is on the disk as
  /// well.
  void move_into_place();

 private:
  void create(Under under);
  bool set_direct(bool on);
  void give_back_room();
  void append_as_set(const void* data, size_t bytes);
  void discard() noexcept;
  [[noreturn]] void fail(const std::string& doing, int error);

  std::string path_;
  std::string folder_;
  std::string name_;  // that it has on the disk; empty: nothing to remove
  uint64_t bytes_;
  int64_t written_ = 0;
  int64_t started_ = 0;
  int fd_ = -1;
  bool direct_ = false;
  bool refused_direct_ = false;
};

}  // namespace echelon
