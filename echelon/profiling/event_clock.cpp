#include "echelon/profiling/event_clock.h"

#include <cmath>
#include <limits>
#include <utility>

namespace echelon::profiling {
namespace {

constexpr int kOriginTries = 5;

}  // namespace

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
    guard_.synchronizeDevice(device_index);
    // The event is over somewhere between two readings of the host's clock. Of
    // a few tries the closest readings are taken.
    Origin origin{recorded(device)};
    int64_t closest = std::numeric_limits<int64_t>::max();
    for (int i = 0; i < kOriginTries; ++i) {
      const int64_t before = timeline::steady_now_ns();
      c10::Event event = recorded(device);
      event.synchronize();
      const int64_t apart = timeline::steady_now_ns() - before;
      if (apart >= closest) continue;
      closest = apart;
      origin = {std::move(event), before + apart / 2};
    }
    origins_.emplace(device_index, std::move(origin));
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

int64_t EventTimer::mark() {
  const std::lock_guard lock(mutex_);
  if (spare_.empty()) {
    spare_.push_back(static_cast<int64_t>(events_.size()));
    events_.emplace_back(guard_.type(), c10::EventFlag::BACKEND_DEFAULT);
  }
  const int64_t place = spare_.back();
  spare_.pop_back();
  events_[static_cast<size_t>(place)].record(
      guard_.getStream(guard_.getDevice()));
  return place;
}

std::vector<int64_t> EventTimer::take_ns(const std::vector<int64_t>& marks) {
  const std::lock_guard lock(mutex_);
  const auto event = [&](int64_t mark) -> const c10::Event& {
    return events_.at(static_cast<size_t>(mark));
  };
  event(marks.back()).synchronize();
  std::vector<int64_t> times;
  for (const int64_t mark : marks) {
    const double milliseconds = event(marks.front()).elapsedTime(event(mark));
    times.push_back(std::llround(milliseconds * 1e6));
  }
  spare_.insert(spare_.end(), marks.begin(), marks.end());
  return times;
}

}  // namespace echelon::profiling
