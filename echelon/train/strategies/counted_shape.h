// A network's layers as the cost formulas take them, counted on the meta
// device: what `echelon-train count` prints and `echelon simulate --layers`
// reads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/cost/model_shape.h"
#include "echelon/counting/layer_operators.h"
#include "echelon/train/strategies/model_source.h"

namespace echelon {

/// The job's model and, as its last layer, its loss; for one microbatch of the
/// rank that has most samples, each layer with the stage of the job's pipeline.
/// Layers that ranks of tp compute together are counted as one rank has them.
/// Nothing is allocated or sent. Throws as count_layers does.
ModelShape counted_shape(const Job& job, const ModelSource& source);
ModelShape counted_shape(const Job& job);

/// Any list of layers, for `samples` samples, which `inputs` have.
ModelShape counted_shape(
    const LayerList& layers, const std::vector<TensorSpec>& inputs,
    int64_t samples, const std::string& name);

}  // namespace echelon
