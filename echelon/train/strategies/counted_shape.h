// A network's layers for the cost formulas, counted on the meta device.
// `echelon-train count` prints them and `echelon simulate --layers` reads them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/cost/model_shape.h"
#include "echelon/counting/layer_operators.h"
#include "echelon/train/strategies/model_source.h"

namespace echelon {

/// The job's model with its loss as the last layer, counted for one microbatch
/// of the rank with most samples; each layer has its pipeline stage.
/// Tensor-parallel layers are counted as one rank has them. Nothing is
/// allocated or sent. Throws as count_layers does.
ModelShape counted_shape(const Job& job, const ModelSource& source);
ModelShape counted_shape(const Job& job);

/// Any list of layers, for inputs of `samples` samples.
ModelShape counted_shape(
    const LayerList& layers, const std::vector<TensorSpec>& inputs,
    int64_t samples, const std::string& name);

}  // namespace echelon
