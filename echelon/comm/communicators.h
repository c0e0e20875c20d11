// A rank's communicators on its device: one for each set of ranks and, where
// these also have a group for messages, one for that. They are ended in the
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

  struct Key {
    std::vector<int> ranks;
    bool for_messages = false;
    bool operator==(const Key&) const = default;
  };

  /// Null when there is none yet.
  Communicator find(const Key& key) const;
  void add(const Key& key, Communicator communicator);
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
  std::vector<std::pair<Key, Communicator>> made_;
  bool aborted_ = false;
};

}  // namespace echelon
