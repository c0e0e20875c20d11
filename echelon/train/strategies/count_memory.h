// The counts that a plan of memory starts from: each layer run on the meta
// device, as it is and with what backward computes again.
#pragma once

#include "echelon/data/dataset.h"
#include "echelon/memory_plan/memory_plan.h"
#include "echelon/train/strategies/model_source.h"

namespace echelon {

/// Counts the layers of the job's model, of the first tensor-parallel rank, for
/// the largest microbatch of a rank, in the compute dtype. Nothing is allocated
/// or sent; one rank alone may call it. Throws as count_layers does.
MemoryModel count_memory(const Job& job, const ModelSource& source);

/// The same of the job's model and data, which are opened, not read.
MemoryModel count_memory(const Job& job);

/// gathers_once() of the job (memory_plan.h), which is counted where that
/// matters.
bool gathers_once(const Job& job, const ModelSource& source);

}  // namespace echelon
