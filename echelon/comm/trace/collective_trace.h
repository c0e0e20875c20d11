// The collectives that a computation would make, found without making them.
// Calls of silent groups, and calls with tensors on the meta device, send
// nothing (group.h); they are recorded here:
//
//   CollectiveTrace trace;
//   count_layers(layers, inputs);
//   trace.take();              // {"all_reduce", "tp", 4194304}, ...
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace echelon {

struct TracedCollective {
  std::string operation;  // "all_reduce"
  std::string axis;       // the group's
  int64_t bytes = 0;      // of this rank's input
};

/// While an object of this class lives, it records such calls of its thread.
/// The innermost one records.
class CollectiveTrace {
 public:
  CollectiveTrace();
  ~CollectiveTrace();
  CollectiveTrace(const CollectiveTrace&) = delete;
  CollectiveTrace& operator=(const CollectiveTrace&) = delete;

  /// The calls since the last take(), in the order that they were made.
  std::vector<TracedCollective> take();

  /// For groups: records a call of this thread, if a trace is active.
  static void record(TracedCollective call);
  static bool active();

 private:
  std::vector<TracedCollective> calls_;
  CollectiveTrace* outer_;
};

}  // namespace echelon
