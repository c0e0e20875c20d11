// How a model is cut over tensor-parallel ranks, for the report to draw.
#pragma once

#include "echelon/job/job.h"
#include "echelon/report/tensor_cut.h"
#include "echelon/train/strategies/model_source.h"

namespace echelon {

/// What each rank of a tensor-parallel group holds of each parameter. Builds
/// the layers of all ranks, one at a time and without memory; nothing is sent,
/// so one rank may ask for it. No layers when job.layout.tp is 1.
TensorCut describe_cut(const Job& job, const ModelSource& source);

}  // namespace echelon
