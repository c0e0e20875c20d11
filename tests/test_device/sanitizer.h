// Finds accesses of device memory that nothing orders.
//
// Every stream has a clock that counts its operations, and a vector clock: for
// each stream, the number of its operations that happened before the next one
// of this stream. Recording an event copies the vector clock, waiting for it
// takes the maximum. The host has a vector clock as well: what it has waited
// for; a launch happens after it. All of it is computed when work is queued, in
// the host's order, so a finding does not depend on timing.
//
// For each range of device addresses the sanitizer keeps the last write and the
// reads since. An access that does not happen after these is reported. A freed
// block keeps its history, so reuse that comes too early is found as well.
//
// The method is that of FastTrack (Flanagan and Freund, 2009) with whole vector
// clocks, as torch.cuda._sanitizer applies it to streams.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace echelon::test_device {

/// The functions on the calling thread's stack, as addresses.
struct CallStack {
  std::array<void*, 40> frames{};
  int size = 0;

  static CallStack here();
  /// One line for each function of Echelon or of a test, innermost first.
  std::string text() const;
};

/// What an operation is called in reports.
struct Operation {
  std::string name;   // "aten::mm"
  std::string node;   // the node of autograd that launched it, or ""
  std::string label;  // of a collective
  int stream = 0;
  CallStack stack;
};

class VectorClock {
 public:
  uint64_t at(size_t stream) const {
    return stream < times_.size() ? times_[stream] : 0;
  }
  void set(size_t stream, uint64_t time) {
    if (stream >= times_.size()) times_.resize(stream + 1, 0);
    times_[stream] = time;
  }
  void merge(const VectorClock& other);

 private:
  std::vector<uint64_t> times_;
};

/// A range of device addresses that an operation reads or writes.
struct Access {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  bool write = false;
  std::string tensor;  // "float32 [2, 3]"
};

/// The history of one device's memory. Not thread-safe.
class Sanitizer {
 public:
  /// Records the accesses of `operation`, the `time`-th of its stream, whose
  /// predecessors are `before`. Returns a text for each conflict.
  std::vector<std::string> access(
      const std::shared_ptr<const Operation>& operation, uint64_t time,
      const VectorClock& before, const std::vector<Access>& accesses);

 private:
  struct Past {
    std::shared_ptr<const Operation> operation;
    uint64_t time = 0;
    std::shared_ptr<const std::string> tensor;
  };
  struct Range {
    uintptr_t end = 0;
    Past write;
    std::vector<Past> reads;
  };

  void cut(uintptr_t at);

  std::map<uintptr_t, Range> ranges_;  // by begin; they do not overlap
};

}  // namespace echelon::test_device
