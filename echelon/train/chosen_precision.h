// [precision] compute = "auto" and "tf32" on the ranks of a job.
#pragma once

#include "echelon/comm/world.h"
#include "echelon/job/job.h"

namespace echelon {

/// The job's precision as its ranks compute: compute "auto" is bf16 where each
/// rank's GPU has it (job/compute_dtype.h), which rank 0 tells on standard
/// output. On GPUs this also says to LibTorch, for the whole process, whether
/// products of float32 may be TF32. Throws ConfigError for tf32 on CPUs, and
/// for fp8 there and on GPUs that have no such products. Every rank calls this,
/// before it makes a model.
PrecisionOptions chosen_precision(const Job& job, World& world);

}  // namespace echelon
