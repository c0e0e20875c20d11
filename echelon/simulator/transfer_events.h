// Transfers on links that others may use, in order of time: the only things of
// a simulated step that must be.
#pragma once

#include <cstdint>
#include <optional>
#include <queue>
#include <vector>

#include "echelon/simulator/shared_links.h"

namespace echelon::simulator {

class TransferEvents {
 public:
  explicit TransferEvents(size_t num_links) : links_(num_links) {}

  /// The collective of a group in a slot, or a message: the caller's numbers.
  struct Name {
    int32_t slot = 0;
    int32_t number = 0;
  };
  struct Ended {
    Name name;
    double begin = 0;
    double end = 0;
  };

  /// Will begin at `time`, no earlier than what ended last, and takes `seconds`
  /// alone. `links` must outlive it.
  void
  add(Name name, double time, double seconds,
      const std::vector<int32_t>& links);

  /// Goes on to the next end of a transfer; none when nothing is on its way.
  std::optional<Ended> next();

 private:
  struct Start {
    double time = 0;
    Name name;
    double seconds = 0;
    const std::vector<int32_t>* links = nullptr;
    // At the same time, by name: whoever was added first makes no difference.
    bool operator>(const Start& other) const {
      if (time != other.time) return time > other.time;
      if (name.slot != other.name.slot) return name.slot > other.name.slot;
      return name.number > other.name.number;
    }
  };

  void begin(const Start& start);

  SharedLinks links_;
  std::priority_queue<Start, std::vector<Start>, std::greater<>> starts_;
  std::vector<Ended> moving_;  // by number of the transfer on links_
};

}  // namespace echelon::simulator
