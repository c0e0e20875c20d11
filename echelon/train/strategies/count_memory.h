// The counts that a memory plan starts from: each layer runs on the meta
// device, without and with recomputation.
#pragma once

#include "echelon/data/dataset.h"
#include "echelon/memory_plan/memory_plan.h"
#include "echelon/train/strategies/model_source.h"

namespace echelon {

/// Counts the layers of the job's model as the first tensor-parallel rank has
/// them, for the largest microbatch of a rank, in the compute dtype. Nothing is
/// allocated or sent; one rank alone may call it. Throws as count_layers does.
MemoryModel count_memory(const Job& job, const ModelSource& source);

/// The same for the job's model and data, which are opened, not read.
MemoryModel count_memory(const Job& job);

/// gathers_once() of the job (memory_plan.h), counting memory where it matters.
bool gathers_once(const Job& job, const ModelSource& source);

}  // namespace echelon
