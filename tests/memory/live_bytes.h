// Counts the bytes of this thread's CPU tensors.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstdint>
#include <memory>

namespace echelon {

/// Counts while it lives, on this thread and in backward passes that it runs.
class LiveBytes {
 public:
  LiveBytes()
      : counter_(std::make_shared<Counter>()),
        guard_(c10::DebugInfoKind::PROFILER_STATE, counter_) {}

  /// Bytes allocated since construction, less bytes freed since then.
  int64_t now() const { return counter_->now; }
  /// The most since construction or reset_peak().
  int64_t peak() const { return counter_->peak; }
  void reset_peak() { counter_->peak = counter_->now; }

 private:
  struct Counter : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(
        void*, int64_t size, size_t, size_t, c10::Device device) override {
      if (!device.is_cpu()) return;
      now += size;
      peak = std::max(peak, now);
    }
    bool memoryProfilingEnabled() const override { return true; }
    int64_t now = 0;
    int64_t peak = 0;
  };

  std::shared_ptr<Counter> counter_;
  c10::DebugInfoGuard guard_;
};

}  // namespace echelon
