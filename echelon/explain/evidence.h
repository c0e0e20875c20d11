// All that the search for what held a run back looks at.
#pragma once

#include "echelon/explain/run_record.h"
#include "echelon/explain/run_times.h"
#include "echelon/explain/what_if.h"

namespace echelon {

/// Of a step: less is not worth a user's time, or is how unevenly machines run.
inline constexpr double kLeastShare = 0.05;
/// The same of what a busy machine can bring about by itself: ranks that are
/// stopped for a moment, while the others wait for them.
inline constexpr double kLeastWait = 0.10;

struct Evidence {
  const RunRecord& run;
  const RunTimes& times;    // no ranks: there is no timeline
  const RankTimes& shares;  // of the step, mean over ranks
  const WhatIf& what_if;
};

}  // namespace echelon
