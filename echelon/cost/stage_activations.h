// What the layers of each pipeline stage keep for a microbatch, and take
// beside.
#pragma once

#include <vector>

#include "echelon/cost/activation_bytes.h"

namespace echelon {

/// By stage: what its layers keep, the most that one of them, or its loss,
/// takes beside, and what goes to the next stage.
std::vector<ActivationBytes> stage_activations(
    const ModelShape& model, const Strategy& strategy, const Stack& stack);

}  // namespace echelon
