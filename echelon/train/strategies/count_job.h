// A step of a job, counted on the meta device: what each layer keeps, for a
// memory plan, and what it computes, for the cost formulas. Nothing is
// allocated or sent, so that one rank alone may call these functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/cost/model_shape.h"
#include "echelon/data/dataset.h"
#include "echelon/memory_plan/memory_plan.h"
#include "echelon/train/strategies/model_source.h"

namespace echelon {

/// The job with the [precision] compute of ranks on this machine
/// (job/compute_dtype.h). Throws ConfigError for tf32 without a GPU.
Job with_compute_dtype_here(Job job);

/// Counts the layers of the job's model as the first tensor-parallel rank has
/// them, without and with recomputation, for the largest microbatch of a rank,
/// in the compute dtype. Throws as count_layers does.
memory_plan::MemoryModel
count_memory(const Job& job, const ModelSource& source);

/// The same for the job's model and data, or the program's own; data is opened,
/// not read.
memory_plan::MemoryModel count_memory(const Job& job, const OwnParts& own = {});

/// unshards_once() of the job (memory_plan.h), counting memory where it
/// matters.
bool unshards_once(const Job& job, const ModelSource& source);

/// The job's model with its loss as the last layer, counted for one microbatch
/// of the rank with most samples; each layer has its pipeline stage.
/// Tensor-parallel layers are counted as one rank has them, with the
/// collectives within them. For a job on GPUs ([comm] device) operators have
/// the kernels that a GPU runs. Throws as count_layers does. `echelon-train
/// count` prints it and `echelon simulate
/// --layers` reads it.
cost::ModelShape counted_shape(const Job& job, const ModelSource& source);
cost::ModelShape counted_shape(const Job& job, const OwnParts& own = {});

/// Any list of layers, for inputs of `samples` samples.
cost::ModelShape counted_shape(
    const LayerList& layers, const std::vector<counting::TensorSpec>& inputs,
    int64_t samples, const std::string& name);

}  // namespace echelon
