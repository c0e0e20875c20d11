// The device that a layer computes for. Some layers compute differently on CPUs
// and on GPUs. On the meta device, which computes nothing, they must do it as
// on the device that they are counted for, so that the count has its
// temporaries.
#pragma once

#include <torch/types.h>

#include <utility>

namespace echelon {

namespace detail {

inline thread_local torch::DeviceType counted_for = torch::kCPU;

}  // namespace detail

/// The tensor's device type. For a tensor on the meta device it is the one that
/// a CountedFor of this thread names (count_layers), else the CPU.
inline torch::DeviceType computing_device(const torch::Tensor& tensor) {
  const auto type = tensor.device().type();
  return type == torch::kMeta ? detail::counted_for : type;
}

/// While it lives, this thread's meta tensors stand for tensors of `device`.
class CountedFor {
 public:
  explicit CountedFor(torch::DeviceType device)
      : outer_(std::exchange(detail::counted_for, device)) {}
  ~CountedFor() { detail::counted_for = outer_; }
  CountedFor(const CountedFor&) = delete;
  CountedFor& operator=(const CountedFor&) = delete;

 private:
  torch::DeviceType outer_;
};

}  // namespace echelon
