// Whether ranks use their communicators in one order.
#pragma once

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "echelon/text/format.h"

namespace echelon::test_device {

/// Two ranks that use two communicators of both in different orders, without an
/// order of their own between the two, can deadlock: each waits in another one.
class OrderBook {
 public:
  /// Device `rank` queues a call of `communicator`. `peers`: the ranks of the
  /// communicator that a batch of messages is for; none: the call is for all.
  std::optional<std::string>
  add(int rank, const std::string& id, const std::string& name,
      const std::string& call, const std::set<int>& peers) {
    std::lock_guard lock(mutex_);
    const auto& members = members_[id];
    for (const auto& [place, device] : members) {
      if (device == rank || (!peers.empty() && !peers.contains(place)))
        continue;
      lists_[{rank, device}].push_back({id, name, call});
      if (auto found = compare(rank, device)) return found;
    }
    return std::nullopt;
  }
  /// Device `device` is rank `place` of the communicator.
  void member(const std::string& communicator, int place, int device) {
    std::lock_guard lock(mutex_);
    members_[communicator][place] = device;
  }

 private:
  struct Call {
    std::string communicator;  // its id
    std::string name;
    std::string text;
  };

  // The calls that each makes with the other. Equal as far as both have come.
  std::optional<std::string> compare(int a, int b) {
    if (a > b) std::swap(a, b);
    const auto& of_a = lists_[{a, b}];
    const auto& of_b = lists_[{b, a}];
    const size_t both = std::min(of_a.size(), of_b.size());
    size_t& from = known_[{a, b}];
    for (; from < both; ++from) {
      if (of_a[from].communicator == of_b[from].communicator) continue;
      const std::string text = format(
          "two ranks use communicators in different orders: call {} of those "
          "that ranks {} and {} share is {} of {} on rank {}, and {} of {} on "
          "rank {}",
          from, a, b, of_a[from].text, of_a[from].name, a, of_b[from].text,
          of_b[from].name, b);
      from = both;
      return text;
    }
    return std::nullopt;
  }

  std::mutex mutex_;
  // Of a device with another one.
  std::map<std::pair<int, int>, std::vector<Call>> lists_;
  std::map<std::pair<int, int>, size_t> known_;
  std::map<std::string, std::map<int, int>> members_;  // devices
};

inline OrderBook& order_book() {
  static auto* const book = new OrderBook;
  return *book;
}

}  // namespace echelon::test_device
