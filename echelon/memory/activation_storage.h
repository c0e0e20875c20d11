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
/// stream of its own) and back before backward needs it. Tensors below `min_bytes`
/// stay; parameters, of which `is_parameter` tells, stay too. One storage that is
/// saved several times is copied once.
std::shared_ptr<SavedTensorHooks> offload_to_host(
    std::function<bool(const torch::Tensor&)> is_parameter,
    int64_t min_bytes = 1 << 16);

/// Keeps float32 and float64 tensors of at least `min_bytes` rounded to bf16.
std::shared_ptr<SavedTensorHooks> keep_in_bf16(
    std::function<bool(const torch::Tensor&)> is_parameter,
    int64_t min_bytes = 1 << 16);

/// `forward` with the hooks around it.
LayerForward with_hooks(
    LayerForward forward, std::shared_ptr<SavedTensorHooks> hooks);

}  // namespace echelon
