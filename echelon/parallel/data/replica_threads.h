// Threads of this process that are the ranks of a world of their own and do
// what the owner says, again and again.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "echelon/comm/world.h"

namespace echelon {

class ReplicaThreads {
 public:
  /// `threads`: compute threads of each rank; 0 shares the cores evenly.
  /// `release(rank)`: drops what the owner holds of a rank that failed, so that
  /// its groups end and the other ranks do not wait for it.
  ReplicaThreads(
      int num_ranks, int64_t threads, const CommOptions& options,
      std::function<void(int)> release);
  /// Ends the threads, which must not be inside of run().
  ~ReplicaThreads();
  ReplicaThreads(const ReplicaThreads&) = delete;
  ReplicaThreads& operator=(const ReplicaThreads&) = delete;

  /// Runs `body` on every thread with its World and returns when all are done.
  /// Grad mode and autocast are the caller's. Throws the first error as it
  /// was thrown; every later call throws it again, for the ranks no longer
  /// agree. One caller at a time.
  void run(const std::function<void(World&)>& body);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace echelon
