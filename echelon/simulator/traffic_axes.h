// The groups along which ranks of a strategy meet.
//
// Source: Rajbhandari et al., 2020, arXiv:1910.02054 (which ranks shard
// parameters, and which others sum their gradients).
#pragma once

#include <vector>

#include "echelon/cost/strategy.h"
#include "echelon/simulator/rank_classes.h"

namespace echelon::simulator {

/// sharing_axes() (cost/state_bytes.h) as masks, without axes of degree 1.
struct Sharing {
  AxisMask shards = 0;
  AxisMask copies = 0;
};
Sharing sharing_of(const Strategy& strategy, bool experts);

/// All groups, each once. `tied`: the ends of the pipeline sum the gradients of
/// an embedding that both hold.
std::vector<AxisMask> traffic_axes(const Strategy& strategy, bool tied = false);

/// The groups whose collectives run in the background.
std::vector<AxisMask> launched_axes(const Strategy& strategy);

/// The axis under which time spent on such a group is reported.
Axis reported_axis(AxisMask axes, const Layout& layout);

}  // namespace echelon::simulator
