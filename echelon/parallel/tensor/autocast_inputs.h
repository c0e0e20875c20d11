// Products whose autograd function is ours, under autocast: it cannot look
// inside, and a cast that it made and kept in there would have no history. For
// the .cpp files of this folder.
#pragma once

#include <torch/types.h>

#include <ATen/autocast_mode.h>

namespace echelon::detail {

/// `tensor` as autocast gives it to a matrix product: itself where autocast is
/// off for its device.
inline torch::Tensor for_product(const torch::Tensor& tensor) {
  const auto device = tensor.device().type();
  if (!at::autocast::is_autocast_available(device) ||
      !at::autocast::is_autocast_enabled(device)) {
    return tensor;
  }
  return at::autocast::cached_cast(
      at::autocast::get_autocast_dtype(device), tensor, device);
}

/// While it lives this thread computes as if there were no autocast.
class WithoutAutocast {
 private:
  c10::impl::ExcludeDispatchKeyGuard guard_{c10::autocast_dispatch_keyset};
};

}  // namespace echelon::detail
