// A model's layers as lists of operations, on one rank of a strategy.
// Sources: Narayanan et al., 2021, arXiv:2104.04473 (tensor and pipeline);
// Korthikanti et al., 2022, arXiv:2205.05198 (sequence parallelism, recompute,
// activations); DeepSeek-AI, 2024, arXiv:2405.04434 (latent attention); Dao,
// 2023, arXiv:2307.08691 (fused attention).
#pragma once

#include <vector>

#include "echelon/cost/framework.h"
#include "echelon/cost/model_shape.h"
#include "echelon/cost/operation.h"
#include "echelon/cost/strategy.h"

namespace echelon::cost {

/// The layers of the whole model, in order, equal neighbours once
/// (LayerWork::repeat). The last one is the head with the loss.
std::vector<LayerWork> layer_work(
    const ModelShape& model, const Strategy& strategy,
    const Framework& framework);

/// Partitions the layers into pipeline stages (pp * stages_per_rank), as evenly
/// as possible: blocks are spread evenly, the first stage has the embedding and
/// the last one the head; counted layers are partitioned by their FLOPs. Layers
/// beyond `recompute_layers` of a stage recompute nothing. Throws ConfigError
/// when there are fewer layers than stages.
std::vector<std::vector<LayerWork>>
stage_work(const std::vector<LayerWork>& layers, const Strategy& strategy);

/// The layers of a transformer on one rank: embedding, blocks (equal neighbours
/// once) and head.
std::vector<LayerWork> transformer_work(
    const ModelShape& model, const Strategy& strategy,
    const Framework& framework);

/// Elements of a tied embedding on a rank that holds a copy of another rank's:
/// the first and the last rank of a pipeline do, and sum its gradients. 0 when
/// weights are not tied, or when one rank has both ends.
double copied_embedding(
    const TransformerShape& shape, const Strategy& strategy,
    const Framework& framework);

}  // namespace echelon::cost
