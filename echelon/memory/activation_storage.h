// What is kept for backward elsewhere than on the device, or in fewer bits.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "echelon/memory/recompute.h"
#include "echelon/memory/saved_tensors.h"

namespace echelon {

/// Copies what is saved to the host's memory (pinned where there is a GPU, on a
/// stream of its own) and back before backward needs it: what was saved before
/// it comes back ahead of its use. One storage that is saved several times is
/// copied once, and whole; those below `min_bytes` stay, and parameters, of
/// which `is_parameter` tells. Tensors of the CPU are copied as well, which
/// saves nothing. Values are to the bit what they were.
///
/// Forward waits when more than a few copies are on their way, so that the
/// memory of those is all that is not yet free. Throws Error when the host has
/// no memory for a copy. One for all layers of a rank: it knows what comes
/// before what.
std::shared_ptr<SavedTensorHooks> offload_to_host(
    std::function<bool(const torch::Tensor&)> is_parameter,
    int64_t min_bytes = 1 << 16);

/// Keeps float32 and float64 tensors whose storage has at least `min_bytes`
/// rounded to bf16: gradients are then those of rounded activations; results of
/// forward stay as they are. Other dtypes stay.
std::shared_ptr<SavedTensorHooks> keep_in_bf16(
    std::function<bool(const torch::Tensor&)> is_parameter,
    int64_t min_bytes = 1 << 16);

/// `forward` with the hooks around it.
LayerForward
with_hooks(LayerForward forward, std::shared_ptr<SavedTensorHooks> hooks);

}  // namespace echelon
