// The fastest strategies of a job that fit, by branch and bound.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "echelon/cost/step_estimate.h"
#include "echelon/planner/search_space.h"

namespace echelon {

struct Candidate {
  Strategy strategy;
  StepEstimate step;
};

struct SearchResult {
  /// The fastest of each layout (degrees, dp and fsdp taken together), the fastest
  /// layout first.
  std::vector<Candidate> best;
  /// When nothing fits: what is nearest to it. Empty when there is no strategy.
  std::optional<Candidate> closest;
  int64_t considered = 0;      // strategies, before memory is saved
  int64_t pruned_memory = 0;   // of those, by least_bytes
  int64_t pruned_time = 0;     // of those, by lower_bound_seconds
  int64_t estimated = 0;       // calls of estimate_step
};

/// What a step takes at least, whatever is done to save memory: the work of all
/// microbatches shared out evenly over the stages, and the part of the bubble that
/// the schedule cannot avoid where stages differ by less than a tenth. Nothing for
/// optimizer and for communication between data-parallel ranks.
///
///   microbatch_seconds  forward and backward of one microbatch through all layers
double lower_bound_seconds(const Strategy& strategy, double microbatch_seconds);

/// `keep` layouts at most. Each strategy that is not estimated is slower than the
/// last of them by lower_bound_seconds, or cannot fit by least_bytes. Of what saves
/// memory (recompute, in as few layers as will do) nothing is tried on a strategy that
/// fits without; the host's memory is used where nothing fits otherwise, or where the
/// constraints say.
SearchResult search(const SearchJob& job, int64_t keep);

}  // namespace echelon
