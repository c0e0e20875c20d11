// GPipe: all forwards, then all backwards.
//
//   rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 B1 B2 B3
//   rank 1  .  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
//
// Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks
// using Pipeline Parallelism", 2019, arXiv:1811.06965.
//
// One stage a rank, any number of ranks p and microbatches m. Bubble, when all
// stages cost the same: (p-1)/(m+p-1) of the step. Every stage stores all m
// microbatches. The paper runs the backwards from the last microbatch to the
// first; here they run from the first, as in torch.distributed.pipelining: the
// bubble and the memory are the same.
#pragma once

#include "echelon/schedule/schedule.h"

namespace echelon {

Schedule make_gpipe(int32_t ranks, int32_t microbatches);

}  // namespace echelon
