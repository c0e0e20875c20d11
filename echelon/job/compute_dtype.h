// [precision] compute = "auto", "tf32" and "fp8": what they are on a device.
#pragma once

#include "echelon/cluster/device.h"
#include "echelon/job/job.h"

namespace echelon {

/// Throws ConfigError for tf32 and fp8: CPUs have no such products.
void check_compute_on_processor(const Job& job);

/// Throws ConfigError for fp8 on a GPU of a compute capability below 8.9, given
/// as 10 times it; 0: not known, which passes.
void check_compute_on_gpu(const Job& job, int capability);

/// The job as ranks compute it that have GPUs with bf16, or other devices:
/// compute "auto" becomes bf16, or same where there is none. It stays same for
/// [model] dtype = "float64", for a program's own layers, which may need their
/// dtype, and with what 16 bits are not for ([model] devices, [train]
/// compress). Other values stay.
Job with_compute_dtype(Job job, bool gpus_with_bf16);

/// The same for a device that is not here. Throws ConfigError for tf32 and
/// fp8 on a processor.
Job with_compute_dtype(Job job, const cluster::Device& device);

}  // namespace echelon
