// The layers of a transformer as operations: embedding, blocks, head.
// Sources: as layer_work.h; DeepSeek-AI, 2024, arXiv:2405.04434 (latent
// attention); Dao, 2023, arXiv:2307.08691 (fused attention).
#pragma once

#include <vector>

#include "echelon/cost/model_shape.h"
#include "echelon/cost/operation.h"
#include "echelon/cost/stack.h"
#include "echelon/cost/strategy.h"

namespace echelon {

/// Embedding, blocks (equal neighbours once) and head, on one rank.
std::vector<LayerWork> transformer_work(
    const TransformerShape& shape, const Strategy& strategy, const Stack& stack,
    int64_t seq_len);

/// Elements of a tied embedding on a rank that holds a copy of another rank's:
/// the first and the last of a pipeline do, and sum its gradients. 0 when
/// weights are not tied, or both ends are one rank's.
double copied_embedding(
    const TransformerShape& shape, const Strategy& strategy,
    const Stack& stack);

}  // namespace echelon
