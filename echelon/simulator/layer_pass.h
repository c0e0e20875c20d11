// One pass through one layer as instructions.
#pragma once

#include "echelon/cost/operation.h"
#include "echelon/schedule/schedule.h"
#include "echelon/simulator/rank_traffic.h"

namespace echelon::simulator {

struct LayerPassInput {
  const Strategy& strategy;
  const Cluster& cluster;
  const Stack& stack;
  int64_t rank = 0;
};

/// What `layer` computes in an action of this kind, with its own collectives
/// (tp, cp, ep); those of its parameters and gradients are not in it.
Instructions layer_pass(
    const LayerPassInput& input, const LayerWork& layer, ActionKind kind,
    RankTraffic& traffic);

}  // namespace echelon::simulator
