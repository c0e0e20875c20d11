// A model with its loss, as counts of a whole step see it.
#pragma once

#include <cstdint>
#include <vector>

#include "echelon/parallel/tensor/tensor_parallel.h"
#include "echelon/train/strategies/model_source.h"

namespace echelon {

/// [samples, ...shape].
std::vector<int64_t>
with_samples(int64_t samples, const std::vector<int64_t>& shape);

/// The list, and the loss as its last layer, of targets that are on the meta
/// device: it can be counted, not run.
LayerList with_loss(
    const LayerList& layers, const ModelSource& source,
    const TensorParallel& parallel, int64_t samples);

}  // namespace echelon
