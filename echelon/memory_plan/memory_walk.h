// Walks one rank's step, event by event, and adds up bytes, for plan_memory.
// Free of LibTorch.
#pragma once

#include <cstddef>
#include <vector>

#include "echelon/memory_plan/memory_plan.h"

namespace echelon::detail {

/// The rank, and what it decided about unsharded parameters.
struct WalkOptions {
  int pipeline_rank = 0;
  bool unshard_once = false;
};

/// Walks a second step, when everything that persists has been made.
RankPlan
walk_step(const MemoryModel& model, const Job& job, const WalkOptions& options);

/// What each layer of the rank recomputes, as an index into `use`.
std::vector<size_t>
recompute_choices(const MemoryModel& model, const Job& job, int pipeline_rank);

}  // namespace echelon::detail
