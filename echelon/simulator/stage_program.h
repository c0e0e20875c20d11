// The program of one pipeline rank, from the cost of its layers.
//
// Sources: Rajbhandari et al., 2020, arXiv:1910.02054 (which parameters are
// unsharded and which gradients reduced, and when); Zhao et al., 2023,
// arXiv:2304.11277 (prefetched all-gathers).
#pragma once

#include <cstdint>
#include <vector>

#include "echelon/cost/layer_work.h"
#include "echelon/cost/step_estimate.h"
#include "echelon/simulator/rank_classes.h"
#include "echelon/simulator/rank_program.h"

namespace echelon::simulator {

/// All groups along which ranks of a strategy meet, each once. `tied`: the ends
/// of the pipeline sum the gradients of an embedding that both hold.
std::vector<AxisMask> traffic_axes(const cost::Strategy& strategy, bool tied);

/// The groups whose collectives run in the background.
std::vector<AxisMask> launched_axes(const cost::Strategy& strategy);

struct StageProgramInput {
  const cost::Strategy& strategy;
  const cluster::Cluster& cluster;
  const cost::Framework& framework;
  const std::vector<AxisMask>& axes;  // traffic_axes()
  /// The stages of the rank, ascending.
  std::vector<const std::vector<cost::LayerWork>*> stages;
  cost::StageTimes::After after;  // optimizer, other and tied are read
  double tied_bytes = 0;          // gradients of the tied embedding; 0: none
  int64_t rank = 0;               // its device and places count
};

Program make_program(const StageProgramInput& input);

}  // namespace echelon::simulator
