// 1F1B: after a warmup each stage alternates one forward and one backward.
//
//   rank 0  F0 F1 .  .  B0 F2 .  B1 F3 .  B2 .  .  B3     (p = 2, B twice as
//   long) rank 1  .  F0 B0 .  F1 B1 .  F2 B2 .  F3 B3 .
//
// Source: "PipeDream-Flush" in Narayanan et al., "Memory-Efficient
// Pipeline-Parallel DNN Training", 2020, arXiv:2006.09503, section 3; and
// Narayanan et al., 2021, arXiv:2104.04473, section 2.2.1.
//
// One stage a rank, any number of ranks p and microbatches m. Stage s runs
// p-1-s forwards before its first pair. The bubble is GPipe's, (p-1)/(m+p-1);
// stage s stores at most min(m, p-s) microbatches, however many there are.
#pragma once

#include "echelon/schedule/schedule.h"

namespace echelon {

Schedule make_1f1b(int32_t ranks, int32_t microbatches);

}  // namespace echelon
