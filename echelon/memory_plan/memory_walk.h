// One rank's step, event by event, as sums of bytes: what plan_memory is made
// of. Free of LibTorch.
#pragma once

#include <cstddef>
#include <vector>

#include "echelon/memory_plan/memory_plan.h"

namespace echelon::detail {

/// Which of a rank's stages, and what it decided.
struct WalkOptions {
  int pipeline_rank = 0;
  bool gather_once = false;
};

/// A second step, when everything that stays has been made.
RankPlan
walk_step(const MemoryModel& model, const Job& job, const WalkOptions& options);

/// What each layer of the rank computes again, by its number in `use`.
std::vector<size_t>
recompute_choices(const MemoryModel& model, const Job& job, int pipeline_rank);

}  // namespace echelon::detail
