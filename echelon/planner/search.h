// The fastest strategies of a job that fit, by branch and bound.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "echelon/planner/ranking.h"
#include "echelon/planner/search_space.h"

namespace echelon::planner {

/// Replaces the times of formulas by those of simulated events. Memory stays.
void simulate_step(const SearchJob& job, Candidate& candidate);

struct SearchResult {
  /// The fastest of each layout (degrees, dp and fsdp taken together), the
  /// fastest layout first.
  std::vector<Candidate> best;
  /// When nothing fits: the candidate that needs the least, if there is any.
  std::optional<Candidate> closest;
  int64_t considered = 0;     // strategies, before memory is saved
  int64_t pruned_memory = 0;  // of those, by least_bytes
  int64_t pruned_time = 0;    // of those, by PipelineBound or PipelineTimes
  int64_t estimated = 0;      // steps, by formulas
  int64_t simulated = 0;      // steps
};

/// Returns at most `keep` layouts. A strategy is not estimated when it is
/// slower than the last of them by a bound of pipeline_bound.h, or cannot fit
/// by least_bytes. Savings of memory (recompute, in as few layers as possible)
/// are not tried on a strategy that fits without them. The host's memory is
/// used where nothing fits otherwise, or where the constraints ask for it.
///
/// With SearchJob::simulate the first of the layouts has the fastest simulated
/// step of all strategies: those are simulated that may be faster than the best
/// found before, by what formulas say without the communication of data
/// parallelism. So constraints find no faster step than a search without them,
/// other than those that ask for the host's memory.
SearchResult search(const SearchJob& job, int64_t keep);

}  // namespace echelon::planner
