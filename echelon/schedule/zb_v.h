// ZB-V: zero bubble in the memory of 1F1B, with two stages a rank in a V.
//
// Source: Qi et al., arXiv:2401.10241, section 6, and Qi et al., "Pipeline
// Parallelism with Controllable Memory", 2024, arXiv:2405.15362.
//
// Rank r holds the stages r (going down the V) and 2p-1-r (coming up). The rank
// that starts a microbatch also ends it, so its first gradients come early and
// its memory is free again early. Backwards are split into I and W as in
// zero_bubble.h.
//
// Exactly 2 stages a rank; any number of ranks p and microbatches m (for fewer
// than 2p-1 it is that of 2p-1 without the surplus). Every rank stores at most
// 2p activations of its stages, each half as large as with one stage a rank: as
// much as rank 0 of 1F1B, and the same on all ranks. When F = I = W and
// m >= 2p-1 the only idle times are the p-1 forwards in which the pipeline
// fills, rank r idle for r of them before its first action and p-1-r after its
// last, and none between.
#pragma once

#include "echelon/schedule/schedule.h"

namespace echelon {

Schedule make_zb_v(int32_t ranks, int32_t microbatches);

}  // namespace echelon
