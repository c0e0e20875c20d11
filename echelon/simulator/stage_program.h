// The program of one pipeline rank, from the cost of its layers.
//
// Sources: Rajbhandari et al., 2020, arXiv:1910.02054 (which parameters are
// gathered and which gradients reduced when); Zhao et al., 2023,
// arXiv:2304.11277 (gathers ahead of time).
#pragma once

#include <cstdint>
#include <vector>

#include "echelon/cost/layer_work.h"
#include "echelon/cost/step_estimate.h"
#include "echelon/simulator/rank_program.h"
#include "echelon/simulator/traffic_axes.h"

namespace echelon::simulator {

struct StageProgramInput {
  const Strategy& strategy;
  const Cluster& cluster;
  const Stack& stack;
  const std::vector<AxisMask>& axes;  // traffic_axes()
  /// Of the rank, ascending; and whether its first one is the model's.
  std::vector<const std::vector<LayerWork>*> stages;
  StageTimes::After
      after;  // optimizer, other; of the tied embedding, its seconds
  double tied_bytes =
      0;             // of its gradients that the other end holds too; 0: none
  int64_t rank = 0;  // whose device and places count
};

Program make_program(const StageProgramInput& input);

}  // namespace echelon::simulator
