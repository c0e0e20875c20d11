// Which collectives a computation would make, found out without making them:
// calls of silent groups, and calls with tensors on the meta device, which send
// nothing (group.h), are listed.
//
//   const UnsentCalls calls;
//   count_layers(layers, inputs);
//   calls.take();              // {"all_reduce", "tp", 4194304}, ...
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace echelon {

struct UnsentCall {
  std::string operation;  // "all_reduce"
  std::string axis;       // the group's
  int64_t bytes = 0;      // of this rank's input
};

/// While it lives, such calls of this thread are noted; the innermost one has
/// them.
class UnsentCalls {
 public:
  UnsentCalls();
  ~UnsentCalls();
  UnsentCalls(const UnsentCalls&) = delete;
  UnsentCalls& operator=(const UnsentCalls&) = delete;

  /// Since the last call, in the order that they were made.
  std::vector<UnsentCall> take();

  /// For groups: nothing when nobody listens.
  static void note(UnsentCall call);
  static bool listening();

 private:
  std::vector<UnsentCall> calls_;
  UnsentCalls* outer_;
};

}  // namespace echelon
