// The fastest strategies of a job that fit, by branch and bound.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "echelon/planner/candidate.h"
#include "echelon/planner/search_space.h"

namespace echelon {

struct SearchResult {
  /// The fastest of each layout (degrees, dp and fsdp taken together), the
  /// fastest layout first.
  std::vector<Candidate> best;
  /// When nothing fits: what is nearest to it. Empty when there is no strategy.
  std::optional<Candidate> closest;
  int64_t considered = 0;     // strategies, before memory is saved
  int64_t pruned_memory = 0;  // of those, by least_bytes
  int64_t pruned_time = 0;  // of those, by PipelineBound, and by PipelineTimes
  int64_t estimated = 0;    // calls of estimate_step
};

/// `keep` layouts at most. Each strategy that is not estimated is slower than
/// the last of them by pipeline_bound.h or by pipeline_times.h, or cannot fit
/// by least_bytes. Of what saves memory (recompute, in as few layers as will
/// do) nothing is tried on a strategy that fits without; the host's memory is
/// used where nothing fits otherwise, or where the constraints say.
SearchResult search(const SearchJob& job, int64_t keep);

}  // namespace echelon
