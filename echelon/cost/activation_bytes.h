// What layers keep from forward to backward, and take while they compute.
// Source: Korthikanti et al., 2022, arXiv:2205.05198, section 4, but counted by
// tensor, so that it also holds for shared keys, gated and latent layers,
// experts and fused kernels.
#pragma once

#include <vector>

#include "echelon/cost/framework.h"
#include "echelon/cost/model_shape.h"
#include "echelon/cost/strategy.h"

namespace echelon {

/// Bytes of one microbatch of one layer on one rank.
struct ActivationBytes {
  double kept = 0;     // from forward to backward, after recompute
  double working = 0;  // in addition during backward, with what is recomputed
  double output = 0;   // sent to the next stage
};

/// Bytes of an element as layers compute it: 8, 4 or 2.
double element_bytes(Precision precision);

/// Tokens of one microbatch on a rank, before sequence parallelism.
double rank_tokens(const ModelShape& model, const Strategy& strategy);

ActivationBytes block_bytes(
    const ModelShape& model, const Strategy& strategy,
    const Framework& framework, bool experts, Recompute recompute);
/// Last norm, head and loss.
ActivationBytes head_bytes(
    const ModelShape& model, const Strategy& strategy,
    const Framework& framework);
ActivationBytes counted_bytes(
    const CountedLayer& layer, const Strategy& strategy, Recompute recompute);

/// By pipeline stage: what its layers keep for a microbatch, the most that one
/// of them or the loss takes in addition, and what goes to the next stage.
std::vector<ActivationBytes> stage_activations(
    const ModelShape& model, const Strategy& strategy,
    const Framework& framework);

}  // namespace echelon
