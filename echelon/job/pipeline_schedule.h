// The pipeline schedule that a job asks for. Free of LibTorch.
#pragma once

#include <cstdint>

#include "echelon/job/job.h"
#include "echelon/schedule/schedule.h"

namespace echelon {

/// The microbatches of one step, 1 without a pipeline. If not configured, the
/// most that divide every data-parallel rank's batch and for which the schedule
/// is defined, up to 4 for each pipeline rank.
int64_t microbatches_of(const Job& job);

/// The schedule of job.layout.pp ranks, checked. Throws ConfigError as
/// make_schedule does.
Schedule pipeline_schedule(const Job& job);

}  // namespace echelon
