#include "echelon/layers/host_copy.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace echelon {

torch::Tensor to_device(const torch::Tensor& values, torch::Device device) {
  if (device.is_cpu()) return values;
  // A copy from pageable memory would wait for the device.
  return values.pin_memory().to(device, /*non_blocking=*/true);
}

HostCopy::HostCopy(std::vector<torch::Tensor> lists) : host_(std::move(lists)) {
  if (host_.front().is_cpu()) return;
  const torch::NoGradGuard no_grad;
  const auto all = at::cat(host_);
  const auto host = torch::empty_like(
      all, all.options().device(torch::kCPU).pinned_memory(true));
  host.copy_(all, /*non_blocking=*/true);
  const auto device = all.device();
  copied_.emplace(device.type());
  copied_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  int64_t begin = 0;
  for (auto& list : host_) {
    const int64_t length = list.numel();
    list = host.narrow(0, begin, length);
    begin += length;
  }
}

bool HostCopy::is_ready() const {
  return !copied_ || copied_->query();
}

const std::vector<torch::Tensor>& HostCopy::wait() {
  if (copied_) copied_->synchronize();
  copied_.reset();
  return host_;
}

}  // namespace echelon
