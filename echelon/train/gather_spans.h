// Gathers the ranks' spans on rank 0 through the world's group, so that the
// hosts of a job need no shared folder.
#pragma once

#include <vector>

#include "echelon/comm/world.h"
#include "echelon/timeline/timeline.h"

namespace echelon {

/// Every rank of the world calls this. Rank 0 gets the spans of all ranks, by
/// rank, the others nothing. One message a rank.
std::vector<RankSpans> gather_spans(World& world, RankSpans own);

}  // namespace echelon
