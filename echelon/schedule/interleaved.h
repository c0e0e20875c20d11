// Interleaved 1F1B: each rank holds v stages, so the bubble is v times smaller.
//
// Source: Narayanan et al., "Efficient Large-Scale Language Model Training on
// GPU Clusters Using Megatron-LM", 2021, arXiv:2104.04473, section 2.2.2.
//
// Rank r holds the stages r, r + p, … Microbatches go in rounds of n: a rank
// runs a round's forwards on its first stage, then on its second, …; backwards
// likewise from the last stage to the first. It runs (v-1)*n + 2(p-1-r)
// forwards of warmup, then pairs of one forward and one backward.
//
// The paper takes n = p and needs m to be a multiple of p. Here the m
// microbatches make max(1, m/p) rounds as even as can be, the longer ones first
// (torch.distributed.pipelining does so where they come out even), so any m is
// defined. v = 1 is 1F1B.
//
// Bubble, when all stages cost the same and m >= p: (p-1)/(v*m+p-1). Rank r
// stores at most min(v*m, (v-1)*n + 2(p-1-r) + 1) activations of its stages,
// each 1/v as large as those of a schedule with one stage a rank.
#pragma once

#include "echelon/schedule/schedule.h"

namespace echelon {

Schedule
make_interleaved(int32_t ranks, int32_t microbatches, int32_t stages_per_rank);

}  // namespace echelon
