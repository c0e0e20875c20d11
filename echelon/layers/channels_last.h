// The order of an image's numbers in memory. GPUs convolve images of 16 bits
// faster when the channels of a pixel lie together (channels last): their
// matrix units read them so, and other orders are transposed first. LibTorch's
// operators keep the order that they are given.
#pragma once

#include <torch/types.h>

#include <atomic>

#include "echelon/layers/computing_device.h"
#include "echelon/layers/low_precision.h"

namespace echelon {

namespace detail {

inline std::atomic<int> channels_last_everywhere = 0;

}  // namespace detail

/// Whether images [n, channels, h, w] of this dtype on such a device should
/// have channels last. The same on all ranks of a group.
inline bool prefers_channels_last(
    int64_t dimensions, torch::Dtype dtype, torch::DeviceType device) {
  if (dimensions != 4 || !c10::isFloatingType(dtype)) return false;
  return (is_low_precision(dtype) && device != torch::kCPU) ||
         detail::channels_last_everywhere > 0;
}
inline bool prefers_channels_last(const torch::Tensor& x) {
  return prefers_channels_last(x.dim(), x.scalar_type(), computing_device(x));
}

/// The images with channels last; the same tensor where they have them. With
/// one channel both orders are the same memory, and only the strides tell
/// operators which one to keep.
inline torch::Tensor with_channels_last(const torch::Tensor& x) {
  if (x.dim() != 4 || x.size(1) != 1) {
    return x.contiguous(at::MemoryFormat::ChannelsLast);
  }
  return x.contiguous()
      .view({x.size(0), x.size(2), x.size(3), 1})
      .permute({0, 3, 1, 2});
}

/// While it lives, all images of this process should have channels last, also
/// on CPUs and in any floating-point dtype: tests compute there what GPUs do.
class ChannelsLastEverywhere {
 public:
  ChannelsLastEverywhere() { ++detail::channels_last_everywhere; }
  ~ChannelsLastEverywhere() { --detail::channels_last_everywhere; }
  ChannelsLastEverywhere(const ChannelsLastEverywhere&) = delete;
  ChannelsLastEverywhere& operator=(const ChannelsLastEverywhere&) = delete;
};

}  // namespace echelon
