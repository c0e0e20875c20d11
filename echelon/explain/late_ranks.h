// How long ranks wait in collectives for those that come late.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "echelon/layout/layout.h"
#include "echelon/timeline/intervals.h"
#include "echelon/timeline/timeline.h"

namespace echelon {

using RankStep = std::pair<int32_t, int64_t>;  // rank, step

struct LateRanks {
  /// From when a rank came to a collective until the last one of its group did.
  std::map<RankStep, Intervals> waits;
  /// By who came last: the stretches in which some rank waited for it.
  std::map<RankStep, Intervals> caused;
};

/// Collectives of one group are told by their axis, name and order in the step.
/// Which ranks are a group is the layout's to say; without one, all ranks are
/// taken for it where the step's collectives are along one axis, and else
/// nothing is known. Messages between pipeline stages are left out.
LateRanks
late_ranks(const Timeline& timeline, const std::optional<Layout>& layout);

}  // namespace echelon
