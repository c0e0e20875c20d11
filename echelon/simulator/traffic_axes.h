// The groups along which ranks of a strategy meet.
//
// Source: Rajbhandari et al., 2020, arXiv:1910.02054 (who cuts parameters, and
// who else sums their gradients).
#pragma once

#include <vector>

#include "echelon/cost/strategy.h"
#include "echelon/simulator/rank_grid.h"

namespace echelon::simulator {

/// Who shares parameters: of layers, or of experts, whose copies are not spread
/// along ep.
struct Sharing {
  AxisMask shards = 0;  // who cuts them: ZeRO
  AxisMask copies = 0;  // who else sums their gradients
};
Sharing sharing_of(const Strategy& strategy, bool experts);

/// All of them, each once. `tied`: the ends of the pipeline sum the gradients
/// of an embedding that both hold.
std::vector<AxisMask> traffic_axes(const Strategy& strategy, bool tied = false);

/// Those whose collectives run in the background.
std::vector<AxisMask> launched_axes(const Strategy& strategy);

/// The axis that time spent on such a group is reported under.
Axis reported_axis(AxisMask axes, const Layout& layout);

}  // namespace echelon::simulator
