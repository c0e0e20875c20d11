// ZB-H1 and ZB-H2: weight gradients wait, and fill what would be bubble.
//
// Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023,
// arXiv:2401.10241, section 2 (handcrafted schedules).
//
// A backward is split: I, the gradients of inputs, which the previous stage
// waits for, and W, the gradients of weights, which nobody waits for. Both
// schedules are 1F1B in F and I; rank r puts its W off by a number of
// microbatches that grows with r, and so runs them when it would wait.
//
//            warmup     W later by    stored, most    bubble
//   zb-h1    p-1-r      r             p               (p-1)(F+I-W)
//   zb-h2    2(p-1-r)   2r            2p-1            (p-1)(F+I-2W)
//
// for m >= p (zb-h1) and m >= 2p-1 (zb-h2), F, I and W being their times, W no
// longer than F and I, and 0 for a negative bracket. Stored: microbatches
// between their F and their W, on every rank, and never more than m. The bubble
// is the paper's: the time from a rank's first action to its last less the time
// that it computes. ZB-H2 has none when F = I = W, but its ranks start one
// after the other and end so: it gains when a rank goes on to the next step
// without waiting for the others.
//
// One stage a rank, any number of ranks p and microbatches m.
#pragma once

#include "echelon/schedule/schedule.h"

namespace echelon {

Schedule make_zb_h1(int32_t ranks, int32_t microbatches);
Schedule make_zb_h2(int32_t ranks, int32_t microbatches);

}  // namespace echelon
