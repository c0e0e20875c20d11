// Small numbers on their way between the host and a device, without waiting.
#pragma once

#include <c10/core/Event.h>
#include <torch/types.h>

#include <optional>
#include <vector>

namespace echelon {

/// `values`, on the CPU, on `device`. They may change as soon as it returns.
torch::Tensor to_device(const torch::Tensor& values, torch::Device device);

/// A copy of lists of numbers to the host. The constructor queues it behind
/// what the current stream of their device has to do.
class HostCopy {
 public:
  /// `lists` are of one dtype and device, with one dimension.
  explicit HostCopy(std::vector<torch::Tensor> lists);
  /// Whether wait() would return at once.
  bool is_ready() const;
  /// Waits for this copy, and for nothing that was queued after it.
  const std::vector<torch::Tensor>& wait();

 private:
  std::vector<torch::Tensor> host_;
  std::optional<c10::Event> copied_;
};

}  // namespace echelon
