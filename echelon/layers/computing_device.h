// The device that layers compute for, where they do it in one way on CPUs and
// in another on GPUs: on the meta device, which computes nothing, they take the
// way of the device that they are counted for, so that the count has its
// temporaries.
#pragma once

#include <torch/types.h>

namespace echelon {

/// The tensor's kind of device; of a tensor on the meta device the one that a
/// CountedFor of this thread names (count_layers), else the CPU.
torch::DeviceType computing_device(const torch::Tensor& tensor);

/// While it lives, this thread's meta tensors stand for those of such a device.
class CountedFor {
 public:
  explicit CountedFor(torch::DeviceType device);
  ~CountedFor();
  CountedFor(const CountedFor&) = delete;
  CountedFor& operator=(const CountedFor&) = delete;

 private:
  torch::DeviceType outer_;
};

}  // namespace echelon
