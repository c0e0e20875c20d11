// A new file that is written completely or not at all, one that is written
// over, and the removal of what killed processes left of theirs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

namespace echelon {

/// A new file is removed again unless keep() or move_into_place() was reached.
/// Errors of the disk are CheckpointErrors: path, what was done, bytes needed,
/// bytes free.
class NewFile {
 public:
  /// at_path: under its own name, which must not exist yet.
  /// beside: under another name until move_into_place() replaces an older file.
  /// Files that killed processes left under such names are removed.
  /// over: the file at the path, which stays whatever happens. Its old bytes
  /// are gone.
  enum class Under { at_path, beside, over };

  /// Reserves `bytes`, so that a disk that is too full is found before anything
  /// is written. Some file systems cannot: there append() finds it.
  NewFile(std::string path, uint64_t bytes, Under under);
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;
  ~NewFile() { discard(); }

  void append(const void* data, size_t bytes);
  /// Appends past the page cache where the file system allows it: nothing is
  /// copied, and what others have cached stays. kDirectBytes must divide
  /// offset, address and size. Releases the reserved room, so that a disk which
  /// others fill meanwhile is found by the write that fails.
  void append_direct(const void* data, size_t bytes);
  static constexpr size_t kDirectBytes = 4096;
  /// Overwrites the first bytes of what was appended.
  void rewrite_start(const void* data, size_t bytes);
  /// Starts writing back what was appended, so that finish() waits less.
  void start_writing();
  /// On return everything but the folder's entry is on disk, and the file is
  /// closed.
  void finish();
  void keep() noexcept { name_.clear(); }
  /// finish(), then a rename to the path; on return the folder's entry is on
  /// disk as well.
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
  std::string name_;  // current name on disk; empty: nothing to remove
  uint64_t bytes_;
  int64_t written_ = 0;
  int64_t started_ = 0;
  int fd_ = -1;
  bool direct_ = false;
  bool refused_direct_ = false;
  bool over_ = false;
};

/// Marks `file` (a file or a folder) as being written until it is closed. Some
/// file systems have no locks: there the process's number alone marks it.
void claim_part(int file) noexcept;

/// Removes every file and folder named `parts` + process number, optionally
/// followed by "-" and another number ("out.safetensors.part-4711-0"), whose
/// process has ended and which nobody claims; so those of another machine or
/// container, whose processes are not visible here, stay. Never throws:
/// leftovers do no harm.
void remove_leftovers(const std::filesystem::path& parts) noexcept;

}  // namespace echelon
