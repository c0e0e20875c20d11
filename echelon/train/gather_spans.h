// The ranks' spans, brought together on rank 0 through the world's group: the
// hosts of a job need no folder that they share.
#pragma once

#include <vector>

#include "echelon/comm/world.h"
#include "echelon/timeline/rank_spans.h"

namespace echelon {

/// Every rank of the world calls this. Returns those of all ranks, by rank, on
/// rank 0, and nothing elsewhere. One message a rank.
std::vector<RankSpans> gather_spans(World& world, RankSpans own);

}  // namespace echelon
