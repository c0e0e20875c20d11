// The faults that a run can have, one search for each family.
#pragma once

#include <vector>

#include "echelon/explain/evidence.h"
#include "echelon/explain/finding.h"

namespace echelon {

/// Waiting for the next batch; with metrics alone, as rank 0 saw it.
std::vector<RunFinding> find_data_loading(const Evidence& evidence);

/// Collectives that nothing hides, by axis, from when all of their ranks had
/// come.
std::vector<RunFinding> find_exposed_communication(const Evidence& evidence);

/// What a pipeline's ranks wait for each other: the part that uneven stages
/// make (the run's own passes, with and without the difference), the bubble
/// that the schedule has with even ones, and the rest, which passes make that
/// take longer at times.
std::vector<RunFinding> find_pipeline_waits(const Evidence& evidence);

/// One rank that takes longer than its peers in most steps for the same work;
/// and ranks that wait for each other for any other reason.
std::vector<RunFinding> find_uneven_ranks(const Evidence& evidence);

/// Memory near its limit, and layers that are computed again though there is
/// room.
std::vector<RunFinding> find_memory(const Evidence& evidence);

/// Work of a step that does not grow with its batch.
std::vector<RunFinding> find_small_batch(const Evidence& evidence);

}  // namespace echelon
