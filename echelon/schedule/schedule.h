// A pipeline schedule as plain data: for each rank, what it computes in order.
//
// A model is partitioned into stages, slices of its list of layers; a batch is
// split into microbatches. Every stage computes every microbatch forwards and
// backwards. A schedule says which rank holds which stage and in which order a
// rank computes. It lists no transfers, because they follow from that: an
// output goes to the next stage's rank, a gradient to the previous one's.
//
// The pipeline executes this object, the simulator times it and the report
// draws it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace echelon {

enum class ActionKind : uint8_t {
  forward,          // F
  backward,         // B  gradients of inputs and of weights
  backward_input,   // I  gradients of inputs alone, for the previous stage
  backward_weight,  // W  gradients of weights alone, after the same I
};

/// 'F', 'B', 'I' or 'W'.
char letter(ActionKind kind);

struct Action {
  ActionKind kind = ActionKind::forward;
  int32_t stage = 0;
  int32_t microbatch = 0;
  bool operator==(const Action&) const = default;
};

/// "0F1": stage 0, forward of microbatch 1.
std::string to_string(const Action& action);

/// A value. check() (check.h) says whether it can be run.
struct Schedule {
  std::string name;  // "1f1b"; the path when it was read from a file
  int32_t num_microbatches = 0;
  std::vector<int32_t> rank_of_stage;      // by stage, from 0
  std::vector<std::vector<Action>> ranks;  // by pipeline rank, in order

  int32_t num_ranks() const { return static_cast<int32_t>(ranks.size()); }
  int32_t num_stages() const {
    return static_cast<int32_t>(rank_of_stage.size());
  }
  /// The stages that `rank` holds, ascending.
  std::vector<int32_t> stages_of(int32_t rank) const;
  bool operator==(const Schedule&) const = default;
};

}  // namespace echelon
