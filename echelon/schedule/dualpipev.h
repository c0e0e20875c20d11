// DualPipeV: a V of two stages a rank in which forwards meet backwards, so that
// the transfers of the one pass while the other computes.
//
// Source: DualPipe in DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024,
// arXiv:2412.19437, section 3.2.1, cut in half to a V.
//
// Rank r holds the stages r and 2p-1-r. In the middle each forward of one stage
// is followed by a whole backward of the other; these pairs, a forward and a
// backward of different microbatches, are what runs overlapped. Only at the
// ends, where a rank would wait, backwards are split into I and W.
//
// Exactly 2 stages a rank, and at least 2p microbatches. Every rank stores 2p+1
// activations of its stages at most, each half as large as with one stage a
// rank. When F = I = W, and no pair gains from its overlap, every rank is idle
// for p-1 of their times in all.
#pragma once

#include "echelon/schedule/schedule.h"

namespace echelon {

Schedule make_dualpipev(int32_t ranks, int32_t microbatches);

}  // namespace echelon
