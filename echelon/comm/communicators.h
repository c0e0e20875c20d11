// A rank's communicators on its device: one for each set of ranks, ended in the
// order in which they were made.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <mutex>
#include <utility>
#include <vector>

namespace echelon {

/// Thread-safe: the ranks of a process abort each other's.
class Communicators {
 public:
  using Communicator = c10::intrusive_ptr<c10d::Backend>;

  /// The communicator of `ranks`; null when there is none yet.
  Communicator find(const std::vector<int>& ranks) const;
  void add(const std::vector<int>& ranks, Communicator communicator);
  bool empty() const;

  /// Ends them in the order of their creation, after their last calls. Every
  /// rank calls.
  void shut_down();
  /// Ends calls that are under way, whoever waits for them, and every later
  /// one. One rank alone may call.
  void abort() noexcept;

 private:
  std::vector<Communicator> take();

  mutable std::mutex mutex_;
  std::vector<std::pair<std::vector<int>, Communicator>> made_;
  bool aborted_ = false;
};

}  // namespace echelon
