// What layers keep from forward to backward, and take while they compute.
// Source: Korthikanti et al., 2022, arXiv:2205.05198, section 4, by tensor: so
// that it holds for shared keys, gated and latent layers, experts and fused
// kernels too.
#pragma once

#include "echelon/cost/model_shape.h"
#include "echelon/cost/stack.h"
#include "echelon/cost/strategy.h"

namespace echelon {

/// Of one microbatch of one layer on one rank.
struct ActivationBytes {
  double kept = 0;     // from forward to backward, by the way of recompute
  double working = 0;  // in backward beside, with what is computed again
  double output = 0;   // that goes to the next stage
};

/// Bytes of an element as layers compute it: 8, 4 or 2.
double element_bytes(Precision precision);

/// Tokens of one microbatch that a rank has, before sequence parallelism.
double rank_tokens(const ModelShape& model, const Strategy& strategy);

ActivationBytes block_bytes(
    const ModelShape& model, const Strategy& strategy, const Stack& stack,
    bool experts, Recompute recompute);
/// Last norm, head and loss.
ActivationBytes head_bytes(
    const ModelShape& model, const Strategy& strategy, const Stack& stack);
ActivationBytes counted_bytes(
    const CountedLayer& layer, const Strategy& strategy, Recompute recompute);

}  // namespace echelon
