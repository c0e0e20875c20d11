// The pipeline schedule that a job asks for. Free of LibTorch.
#pragma once

#include <cstdint>

#include "echelon/job/job.h"
#include "echelon/schedule/schedule.h"

namespace echelon {

/// The microbatches of one step: as configured, or the most, up to 4 for each
/// pipeline rank, that divide every data rank's batch and for which the
/// schedule is defined. 1 without a pipeline.
int64_t microbatches_of(const Job& job);

/// The schedule of job.layout.pp ranks, checked. Throws ConfigError as
/// make_schedule does.
Schedule pipeline_schedule(const Job& job);

}  // namespace echelon
