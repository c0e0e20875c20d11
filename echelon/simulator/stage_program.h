// The program of one pipeline rank, from the cost of its layers.
//
// Sources: Rajbhandari et al., 2020, arXiv:1910.02054 (which parameters are gathered
// and which gradients reduced when); Zhao et al., 2023, arXiv:2304.11277 (gathers
// ahead of time).
#pragma once

#include <cstdint>
#include <vector>

#include "echelon/cost/layer_work.h"
#include "echelon/cost/step_estimate.h"
#include "echelon/simulator/rank_grid.h"
#include "echelon/simulator/rank_program.h"

namespace echelon::simulator {

struct StageProgramInput {
  const Strategy& strategy;
  const Cluster& cluster;
  const Stack& stack;
  const std::vector<AxisMask>& axes;  // traffic_axes(): what Instruction::group counts
  /// Of the rank, ascending; and whether its first one is the model's.
  std::vector<const std::vector<LayerWork>*> stages;
  StageTimes::After after;  // optimizer, other
  int64_t rank = 0;         // whose device and places count
};

/// The groups along which ranks of this strategy meet, each once.
std::vector<AxisMask> traffic_axes(const Strategy& strategy);

/// Those of them whose collectives run in the background.
std::vector<AxisMask> launched_axes(const Strategy& strategy);

/// The axis that time spent on such a group is reported under.
Axis reported_axis(AxisMask axes, const Layout& layout);

Program make_program(const StageProgramInput& input);

}  // namespace echelon::simulator
