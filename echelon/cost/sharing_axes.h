// Which ranks share parameters: who cuts them, and who else sums their
// gradients.
//
// Source: Rajbhandari et al., 2020, arXiv:1910.02054; ranks of context
// parallelism have the same parameters, and are of who cuts them in some
// software (StackMemory::shards_over_cp).
#pragma once

#include <span>

#include "echelon/cost/stack.h"
#include "echelon/cost/strategy.h"

namespace echelon {

struct SharingAxes {
  std::span<const Axis> shards;  // ZeRO; none in stage 0
  std::span<const Axis> copies;
};

/// Of what is no expert, or of experts, whose copies are not spread along ep.
SharingAxes
sharing_axes(const Strategy& strategy, const Stack& stack, bool experts);

}  // namespace echelon
