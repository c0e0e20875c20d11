// Which jobs can have their steps captured as CUDA graphs.
#pragma once

#include <string>

#include "echelon/job/job.h"

namespace echelon {

/// Why the steps of this job cannot be captured, a clause; empty when they can.
/// A graph repeats what the device was given: a step in which the host decides
/// by numbers of the device, or that replaces tensors of the step before, is
/// none.
std::string why_not_captured(const Job& job);

/// Whether ranks with GPUs capture steps, by [train] cuda_graphs. With "auto"
/// that leaves out what only its author can know to be safe: a program's own
/// layers and objective.
bool captures_steps(const Job& job);

}  // namespace echelon
