// What a walk over a step adds up: bytes held, buffers that are kept, calls.
// Free of LibTorch.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "echelon/memory_plan/memory_plan.h"

namespace echelon::detail {

/// What a rank holds now, and the fullest moment.
class MemoryTally {
 public:
  void hold(MemoryKind kind, int64_t bytes) { now_[kind] += bytes; }
  void drop(MemoryKind kind, int64_t bytes) { now_[kind] -= bytes; }
  void hold_on_host(int64_t bytes);
  void drop_on_host(int64_t bytes) { host_ -= bytes; }
  /// A moment at which there is `more` as well.
  void moment(const std::string& what, const MemoryByKind& more = {});
  void forget_peak();

  const MemoryByKind& now() const { return now_; }
  const MemoryByKind& peak() const { return peak_; }
  const std::string& peak_moment() const { return moment_; }
  int64_t host_peak() const { return host_peak_; }

 private:
  MemoryByKind now_;
  MemoryByKind peak_;
  std::string moment_;
  int64_t host_ = 0;
  int64_t host_peak_ = 0;
};

/// Blocks by size that are kept when they are given back
/// (parallel/shard/buffer_pool.h); an idle one stays of the kind it had.
class PooledBytes {
 public:
  explicit PooledBytes(MemoryTally& tally) : tally_(tally) {}
  void take(int64_t bytes, MemoryKind kind);
  void give(int64_t bytes, MemoryKind kind);
  /// A step has ended.
  void trim();

 private:
  struct Size {
    std::vector<MemoryKind> idle;
    int64_t used = 0;
    int64_t peak = 0;
  };
  MemoryTally& tally_;
  std::map<int64_t, Size> sizes_;
};

/// Calls of one kind are one line; nothing is added while it is off.
class CallList {
 public:
  void turn_on() { on_ = true; }
  bool on() const { return on_; }
  void
  add(const std::string& operation, const std::string& axis,
      const std::string& what, int64_t bytes, int64_t count = 1);
  std::vector<PlannedCalls> take() { return std::move(list_); }

 private:
  bool on_ = false;
  std::vector<PlannedCalls> list_;
};

}  // namespace echelon::detail
