// Every operator that layers run, counted as layer_cost.h counts.
#pragma once

#include <vector>

#include "echelon/counting/layer_cost.h"
#include "echelon/counting/operator_work.h"

namespace echelon {

/// Of one layer, in the order that they ran.
struct LayerOperators {
  std::vector<OperatorWork> forward;
  std::vector<OperatorWork> backward;
};

struct CountedOperators {
  std::vector<LayerCost> costs;  // as count_layers has them
  std::vector<LayerOperators> layers;
};

/// Throws as count_layers does.
CountedOperators count_operators(
    const LayerList& layers, const std::vector<TensorSpec>& inputs,
    const CountOptions& options = {});

}  // namespace echelon
