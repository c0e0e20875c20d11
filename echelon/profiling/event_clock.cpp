#include "echelon/profiling/event_clock.h"

#include <cmath>
#include <utility>

namespace echelon::profiling {

// Events have times only with this flag.
c10::Event EventClock::recorded(c10::Device device) const {
  c10::Event event(guard_.type(), c10::EventFlag::BACKEND_DEFAULT);
  event.record(guard_.getStream(device));
  return event;
}

int64_t EventClock::mark(int index) {
  const auto device_index = index < 0 ? guard_.getDevice().index()
                                      : static_cast<c10::DeviceIndex>(index);
  const c10::Device device(guard_.type(), device_index);
  const std::lock_guard lock(mutex_);
  if (!origins_.contains(device_index)) {
    c10::Event event = recorded(device);
    event.synchronize();
    origins_.emplace(
        device_index, Origin{std::move(event), timeline::steady_now_ns()});
  }
  marks_.push_back({recorded(device), device_index});
  return static_cast<int64_t>(marks_.size()) - 1;
}

int64_t EventClock::time_ns(int64_t number) {
  const std::lock_guard lock(mutex_);
  const Mark& mark = marks_.at(static_cast<size_t>(number));
  const Origin& origin = origins_.at(mark.device);
  mark.event.synchronize();
  const double milliseconds = origin.event.elapsedTime(mark.event);
  return origin.host_ns + std::llround(milliseconds * 1e6);
}

}  // namespace echelon::profiling
