// Memory for big tensors that the other processes of the host can map: a memory
// file with a best-fit allocator. Freed blocks are kept and joined with their
// neighbours, so that a training step touches no fresh page. Free memory beyond
// 1 GiB and beyond the memory in use goes back to the system.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace echelon::local {

class Arena {
 public:
  static constexpr size_t kMinBytes = 64 << 10;

  /// Reserves addresses for all of this machine's memory. Throws CommError.
  Arena();
  ~Arena();
  Arena(const Arena&) = delete;

  /// Page-aligned; null when the addresses are used up.
  void* allocate(size_t bytes);
  void release(void* data);
  /// Whether allocate() may have given `data`.
  bool contains(const void* data) const {
    const auto* at = static_cast<const char*>(data);
    return at >= base_ && at < base_ + bytes_;
  }

  /// The size of a block that is in use.
  size_t size_of(const void* data) const;

  int descriptor() const { return descriptor_; }
  char* base() const { return base_; }
  size_t bytes() const { return bytes_; }
  size_t used_bytes() const;

  /// The arena of this process, which lives as long as the process.
  static Arena& of_process();

 private:
  struct Block {
    size_t bytes;
    size_t touched;  // upper bound of the bytes in memory
  };
  void insert_free(size_t offset, Block block);

  int descriptor_ = -1;
  char* base_ = nullptr;
  size_t bytes_ = 0;
  mutable std::mutex mutex_;
  std::map<size_t, size_t> used_;                     // offset -> bytes
  std::map<size_t, Block> free_;                      // by offset
  std::set<std::pair<size_t, size_t>> free_by_size_;  // (bytes, offset)
  size_t used_bytes_ = 0;
  size_t kept_bytes_ = 0;  // free, but in memory
};

}  // namespace echelon::local
