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
  /// Device `rank` queues a call of `communicator`.
  std::optional<std::string>
  add(int rank, const std::string& id, const std::string& name,
      const std::string& call) {
    std::lock_guard lock(mutex_);
    lists_[rank].push_back({id, name, call});
    for (const int other : members_[id]) {
      if (other == rank) continue;
      if (auto found = compare(rank, other)) return found;
    }
    return std::nullopt;
  }
  void member(const std::string& communicator, int rank) {
    std::lock_guard lock(mutex_);
    members_[communicator].insert(rank);
  }

 private:
  struct Call {
    std::string communicator;  // its id
    std::string name;
    std::string text;
  };

  // The calls of the communicators that both ranks are in, in the order of
  // each. Equal as far as both have come.
  std::optional<std::string> compare(int a, int b) {
    const auto shared = [&](const std::vector<Call>& calls) {
      std::vector<const Call*> result;
      for (const Call& call : calls) {
        const auto& members = members_[call.communicator];
        if (members.contains(a) && members.contains(b)) {
          result.push_back(&call);
        }
      }
      return result;
    };
    if (a > b) std::swap(a, b);
    const auto of_a = shared(lists_[a]);
    const auto of_b = shared(lists_[b]);
    const size_t both = std::min(of_a.size(), of_b.size());
    size_t& from = known_[{a, b}];
    for (; from < both; ++from) {
      if (of_a[from]->communicator == of_b[from]->communicator) continue;
      const std::string text = format(
          "two ranks use communicators in different orders: call {} of those "
          "that ranks {} and {} share is {} of {} on rank {}, and {} of {} on "
          "rank {}",
          from, a, b, of_a[from]->text, of_a[from]->name, a, of_b[from]->text,
          of_b[from]->name, b);
      from = both;
      return text;
    }
    return std::nullopt;
  }

  std::mutex mutex_;
  std::map<int, std::vector<Call>> lists_;  // by device
  std::map<std::pair<int, int>, size_t> known_;
  std::map<std::string, std::set<int>> members_;
};

inline OrderBook& order_book() {
  static auto* const book = new OrderBook;
  return *book;
}

}  // namespace echelon::test_device
