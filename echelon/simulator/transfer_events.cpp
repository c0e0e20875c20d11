#include "echelon/simulator/transfer_events.h"

#include <limits>

namespace echelon::simulator {

void TransferEvents::add(
    Name name, double time, double seconds, const std::vector<int32_t>& links) {
  starts_.push({time, name, seconds, &links});
}

std::optional<TransferEvents::Ended> TransferEvents::next() {
  for (;;) {
    const double end = links_.next_end();
    if (!starts_.empty() && starts_.top().time < end) {
      const Start start = starts_.top();
      starts_.pop();
      begin(start);
    } else if (end < std::numeric_limits<double>::infinity()) {
      Ended ended = moving_[static_cast<size_t>(links_.take_end())];
      ended.end = end;
      return ended;
    } else {
      return std::nullopt;
    }
  }
}

void TransferEvents::begin(const Start& start) {
  const auto number = static_cast<size_t>(
      links_.start(start.time, start.seconds, *start.links));
  if (moving_.size() <= number) moving_.resize(number + 1);
  moving_[number] = {.name = start.name, .begin = start.time, .end = 0};
}

}  // namespace echelon::simulator
