// A model's layers as lists of operations, on one rank of a strategy.
// Sources: Narayanan et al., 2021, arXiv:2104.04473 (tensor and pipeline);
// Korthikanti et al., 2022, arXiv:2205.05198 (sequence parallelism, recompute,
// activations).
#pragma once

#include <vector>

#include "echelon/cost/model_shape.h"
#include "echelon/cost/operation.h"
#include "echelon/cost/stack.h"
#include "echelon/cost/strategy.h"

namespace echelon {

/// Of the whole model, in order, equal neighbours once (LayerWork::repeat). The
/// last one is the loss with the head.
std::vector<LayerWork> layer_work(
    const ModelShape& model, const Strategy& strategy, const Stack& stack);

/// Cut into pipeline stages (pp * stages_per_rank), as even as can be by the
/// stack's rule: blocks are spread evenly, the embedding is the first stage's,
/// the head the last one's; layers that were counted are cut by their FLOPs.
/// Layers beyond `recompute_layers` of a stage compute nothing again. Throws
/// ConfigError when there are fewer layers than stages.
std::vector<std::vector<LayerWork>> stage_work(
    const std::vector<LayerWork>& layers, const Strategy& strategy,
    const Stack& stack);

}  // namespace echelon
