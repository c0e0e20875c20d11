// Storage of activations, which autograd keeps for backward, on the host or in
// fewer bits.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "echelon/memory/recompute.h"
#include "echelon/memory/saved_tensors.h"

namespace echelon {

/// Copies saved tensors to host memory (pinned if there is a GPU, on a stream
/// of its own) and prefetches them in backward, in the reverse order of saving.
/// A storage that is saved several times is copied once, and as a whole.
/// Storages below `min_bytes` stay, and so do parameters, which `is_parameter`
/// recognises. CPU tensors are copied as well, which saves nothing. Values come
/// back bit for bit.
///
/// Forward waits while more than a few copies are in flight, so that only their
/// memory is not yet free. Throws Error when the host has no memory for a copy.
/// All layers of a rank must share one instance: it knows the order of saving.
std::shared_ptr<SavedTensorHooks> offload_to_host(
    std::function<bool(const torch::Tensor&)> is_parameter,
    int64_t min_bytes = 1 << 16);

/// Keeps float32 and float64 tensors whose storage has at least `min_bytes`
/// rounded to bf16. The results of forward do not change, but gradients are
/// those of the rounded activations. Other dtypes stay.
std::shared_ptr<SavedTensorHooks> keep_in_bf16(
    std::function<bool(const torch::Tensor&)> is_parameter,
    int64_t min_bytes = 1 << 16);

/// `forward` with the hooks around it.
LayerForward
with_hooks(LayerForward forward, std::shared_ptr<SavedTensorHooks> hooks);

}  // namespace echelon
