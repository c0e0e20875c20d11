// Looped breadth-first: GPipe with v stages a rank, stage after stage.
//
// Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022,
// arXiv:2211.05953.
//
// Rank r holds the stages r, r + p, … It runs all forwards of its first stage,
// then of its second, …; then all backwards of its last stage, … A stage's
// parameters are thus needed for one stretch of forwards and one of backwards,
// which is what makes it cheap to shard them. v = 1 is GPipe.
//
// Any number of ranks p and microbatches m. Bubble, when all stages cost the
// same: 1 - v*m / ((v-1)*max(m,p) + m + p - 1), which is (p-1)/(v*m+p-1) from
// m = p on. Every stage stores all m microbatches.
#pragma once

#include "echelon/schedule/schedule.h"

namespace echelon {

Schedule make_breadth_first(
    int32_t ranks, int32_t microbatches, int32_t stages_per_rank);

}  // namespace echelon
