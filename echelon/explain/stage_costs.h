// What a pipeline's passes took, and how long its schedule takes with them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "echelon/timeline/timeline.h"

namespace echelon {

struct StageCosts {
  /// Of a microbatch, by stage: forward and all kinds of backward; means over
  /// the typical steps and the copies of the pipeline. Waits inside are left
  /// out.
  std::vector<double> seconds;
  /// The run's own order of passes with these costs, from the first begin to
  /// the last end, and with costs that are the same for all stages; means over
  /// the steps.
  double as_they_are = 0;
  double even = 0;
  double busy_share = 0;           // of `even`, that a rank computes
  std::vector<int> slowest_ranks;  // that hold the stage which takes longest
};

/// Empty: the timeline has no pipeline, or its passes cannot be put in order.
std::optional<StageCosts>
stage_costs(const Timeline& timeline, const std::vector<int64_t>& steps);

}  // namespace echelon
