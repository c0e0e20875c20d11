// Whether a strategy is one for this model and cluster.
#pragma once

#include <string>

#include "echelon/cluster/cluster.h"
#include "echelon/cost/model_shape.h"
#include "echelon/cost/strategy.h"

namespace echelon {

/// Why the strategy is none for this model and cluster ("tp=3 does not divide
/// 32 heads; 1, 2, 4, 8, 16 and 32 do"); empty when it is one. Whether it fits
/// the memory is another question (memory_estimate.h).
std::string check_strategy(
    const ModelShape& model, const Strategy& strategy, const Cluster& cluster);

}  // namespace echelon
