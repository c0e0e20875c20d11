// The operators that layers run, counted as in layer_cost.h.
#pragma once

#include <vector>

#include "echelon/counting/layer_cost.h"
#include "echelon/counting/operator_work.h"

namespace echelon {

/// The operators of one layer, in the order in which they ran.
struct LayerOperators {
  std::vector<OperatorWork> forward;
  std::vector<OperatorWork> backward;
};

struct CountedOperators {
  std::vector<LayerCost> costs;  // as of count_layers
  std::vector<LayerOperators> layers;
};

/// Throws as count_layers does.
CountedOperators count_operators(
    const LayerList& layers, const std::vector<TensorSpec>& inputs,
    const CountOptions& options = {});

}  // namespace echelon
