// The 16-bit dtypes. Layers keep activations and products in them, but sum in
// float32 and round once.
// Source: Micikevicius et al., "Mixed precision training", 2018,
// arXiv:1710.03740, section 3.3.
#pragma once

#include <torch/types.h>

#include <ATen/autocast_mode.h>

namespace echelon {

/// True for bf16 and fp16.
inline bool is_low_precision(torch::Dtype dtype) {
  return dtype == torch::kBFloat16 || dtype == torch::kHalf;
}

/// The dtype in which numbers of this dtype are summed.
inline torch::Dtype sum_dtype(torch::Dtype dtype) {
  return is_low_precision(dtype) ? torch::kFloat32 : dtype;
}

/// `tensor` in its sum_dtype; the same tensor where that is its own dtype. An
/// undefined tensor stays undefined. Differentiable.
inline torch::Tensor for_sums(const torch::Tensor& tensor) {
  return tensor.defined() ? tensor.to(sum_dtype(tensor.scalar_type())) : tensor;
}

/// `tensor` cast as autocast would for a matmul; itself where autocast is off.
/// For the inputs of autograd functions that multiply: autocast cannot look
/// inside of them, and a cast that it made and cached there would have no
/// history. Exclude c10::autocast_dispatch_keyset around the function.
inline torch::Tensor cast_for_matmul(const torch::Tensor& tensor) {
  const auto device = tensor.device().type();
  if (!at::autocast::is_autocast_available(device) ||
      !at::autocast::is_autocast_enabled(device)) {
    return tensor;
  }
  return at::autocast::cached_cast(
      at::autocast::get_autocast_dtype(device), tensor, device);
}

}  // namespace echelon
