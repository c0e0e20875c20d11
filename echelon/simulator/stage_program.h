// The program of one pipeline rank, from the cost of its layers.
//
// Sources: Rajbhandari et al., 2020, arXiv:1910.02054 (which parameters are
// gathered and which gradients reduced, and when); Zhao et al., 2023,
// arXiv:2304.11277 (prefetched all-gathers).
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
  const Framework& framework;
  const std::vector<AxisMask>& axes;  // traffic_axes()
  /// The stages of the rank, ascending.
  std::vector<const std::vector<LayerWork>*> stages;
  StageTimes::After after;  // optimizer, other and tied are read
  double tied_bytes = 0;    // gradients of the tied embedding; 0: none
  int64_t rank = 0;         // its device and places count
};

Program make_program(const StageProgramInput& input);

}  // namespace echelon::simulator
