#include "echelon/train/strategies/host_copy.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace echelon {

torch::Tensor to_device(const torch::Tensor& values, torch::Device device) {
  if (device.is_cpu()) return values;
  // A copy from pageable memory would wait for the device.
  return values.pin_memory().to(device, /*non_blocking=*/true);
}

HostCopy::HostCopy(const torch::Tensor& values) {
  if (values.is_cpu()) {
    host_ = values;
    return;
  }
  const torch::NoGradGuard no_grad;
  host_ = torch::empty_like(
      values, values.options().device(torch::kCPU).pinned_memory(true));
  host_.copy_(values, /*non_blocking=*/true);
  copied_.emplace(values.device().type());
  copied_->record(c10::impl::VirtualGuardImpl(values.device().type())
                      .getStream(values.device()));
}

const torch::Tensor& HostCopy::wait() {
  if (copied_) copied_->synchronize();
  copied_.reset();
  return host_;
}

}  // namespace echelon
