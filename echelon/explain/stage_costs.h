// The time of a pipeline's passes, and of its schedule with such passes.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "echelon/timeline/timeline.h"

namespace echelon {

struct StageCosts {
  /// Forward and backward of a microbatch, by stage, without waits: means over
  /// the typical steps and the replicas of the pipeline.
  std::vector<double> seconds;
  /// The time of the run's own order of passes, from the first begin to the
  /// last end: with these costs, and with the same costs for all stages. Means
  /// over the steps.
  double as_they_are = 0;
  double even = 0;
  double busy_share = 0;           // the share of `even` that a rank computes
  std::vector<int> slowest_ranks;  // that hold the slowest stage
};

/// Empty when the timeline has no pipeline, or its passes cannot be put in
/// order.
std::optional<StageCosts>
stage_costs(const Timeline& timeline, const std::vector<int64_t>& steps);

}  // namespace echelon
