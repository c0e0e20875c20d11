// The times of a device with streams, by events.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "echelon/timeline/recorder.h"

namespace echelon::profiling {

/// A mark is an event with a time. The first mark of each device waits for all
/// that it was given before, and takes the host's clock: other times are
/// measured from there, so a clock should be made when recording begins.
///
/// Throws what the device throws, an earlier error of its queue among it.
class EventClock : public timeline::DeviceClock {
 public:
  explicit EventClock(c10::DeviceType type) : guard_(type) {}

  int64_t mark(int device) override;
  int64_t time_ns(int64_t mark) override;

 private:
  struct Origin {
    c10::Event event;
    int64_t host_ns = 0;
  };
  struct Mark {
    c10::Event event;
    c10::DeviceIndex device = 0;
  };
  c10::Event recorded(c10::Device device) const;

  const c10::impl::VirtualGuardImpl guard_;
  std::mutex mutex_;
  std::map<c10::DeviceIndex, Origin> origins_;
  std::deque<Mark> marks_;
};

/// A mark is an event with a time, which is used again once it has been read:
/// a run needs as many as two steps have, whatever its length. Times are
/// measured from the first mark that is read with them, since a device's times
/// are of 32 bits: far from an origin they would be coarse.
class EventTimer : public timeline::DeviceTimer {
 public:
  explicit EventTimer(c10::DeviceType type) : guard_(type) {}

  int64_t mark() override;
  std::vector<int64_t> take_ns(const std::vector<int64_t>& marks) override;

 private:
  const c10::impl::VirtualGuardImpl guard_;
  std::mutex mutex_;
  std::deque<c10::Event> events_;
  std::vector<int64_t> spare_;  // places in events_
};

}  // namespace echelon::profiling
