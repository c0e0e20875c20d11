// The search for what held a run back: what it looks at, and one search for
// each family of faults.
#pragma once

#include <vector>

#include "echelon/explain/finding.h"
#include "echelon/explain/run_record.h"
#include "echelon/explain/run_times.h"
#include "echelon/explain/what_if.h"

namespace echelon {

/// The share of a step below which a fault is not reported: machines vary by as
/// much.
inline constexpr double kLeastShare = 0.05;
/// The same for waits, which a busy machine can cause by itself when it stops a
/// rank for a moment.
inline constexpr double kLeastWait = 0.10;

struct Evidence {
  const RunRecord& run;
  const RunTimes& times;    // without ranks: there is no timeline
  const RankTimes& shares;  // of the step, mean over ranks
  const WhatIf& what_if;
};

/// Waiting for the next batch; with metrics alone, as rank 0 saw it.
std::vector<RunFinding> find_data_loading(const Evidence& evidence);

/// Exposed collectives, by axis, from when all of their ranks had come.
std::vector<RunFinding> find_exposed_communication(const Evidence& evidence);

/// The waits of a pipeline's ranks for each other, in three parts: those that
/// uneven stages cause (the run's own passes, with and without the difference),
/// the bubble of the schedule with even stages, and the rest, which passes
/// cause that sometimes take longer.
std::vector<RunFinding> find_pipeline_waits(const Evidence& evidence);

/// A straggler, which takes longer than its peers in most steps for the same
/// work; and ranks that wait for each other for any other reason.
std::vector<RunFinding> find_uneven_ranks(const Evidence& evidence);

/// Memory near its limit, and recomputed layers although there is room.
std::vector<RunFinding> find_memory(const Evidence& evidence);

/// Work of a step that does not grow with its batch.
std::vector<RunFinding> find_small_batch(const Evidence& evidence);

/// Takes the settings of `step` as the fix, with their simulated gain.
void take_simulated_fix(
    const Evidence& evidence, const WhatIfStep& step, RunFinding& found);

}  // namespace echelon
