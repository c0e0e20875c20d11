// A file written by a thread of its own while its bytes are still being made.
// Not for others than the writers of this folder.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <thread>

#include "echelon/checkpoint/format/new_file.h"

namespace echelon {

/// While a buffer is written, past the system's cache, the next one is filled.
/// Takes two buffers of kBufferBytes, or one of the file's size if that is no
/// more; then there is no thread either.
///
/// One thread calls it. What the disk refuses is a CheckpointError of a later
/// append() or of finish(); nothing may be called after it.
class WriteBehind {
 public:
  static constexpr size_t kBufferBytes = 1 << 20;

  /// Borrows the file, into which `bytes` in all will go.
  WriteBehind(NewFile& file, uint64_t bytes);
  WriteBehind(const WriteBehind&) = delete;
  WriteBehind& operator=(const WriteBehind&) = delete;
  ~WriteBehind();

  void append(std::span<const std::byte> data);
  /// Everything was handed to the system; NewFile::finish() is the caller's.
  void finish();

 private:
  static constexpr std::align_val_t kAlign{NewFile::kDirectBytes};
  struct Free {
    void operator()(std::byte* at) const { ::operator delete[](at, kAlign); }
  };
  using Memory = std::unique_ptr<std::byte[], Free>;

  void hand_over();
  void write_all();
  void write(std::span<const std::byte> buffer);

  NewFile& file_;
  const size_t buffer_bytes_;
  std::array<Memory, 2> memory_;
  size_t filling_ = 0;  // which of them
  size_t filled_ = 0;   // bytes of it

  std::mutex mutex_;
  std::condition_variable changed_;
  std::span<const std::byte> full_;  // to be written; empty: nothing is
  bool ended_ = false;
  std::exception_ptr error_;
  std::thread thread_;  // from the first full buffer on
};

}  // namespace echelon
