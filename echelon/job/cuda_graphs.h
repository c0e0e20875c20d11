// Which jobs can have their steps captured as CUDA graphs.
#pragma once

#include <string>

#include "echelon/job/job.h"

namespace echelon {

/// Why the steps of this job cannot be captured, a clause; empty when they can.
/// A graph repeats what the device was given. So the host may not read numbers
/// of the device within a step, and a step may not keep its results in new
/// tensors for the next one.
std::string why_not_captured(const Job& job);

/// Whether ranks with GPUs capture steps, by [train] cuda_graphs. "auto" does
/// not capture a program's own layers or data, which only their author knows to
/// be safe.
bool captures_steps(const Job& job);

}  // namespace echelon
