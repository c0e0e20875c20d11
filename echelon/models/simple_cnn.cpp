#include "echelon/layers/computing_device.h"
#include "echelon/models/build.h"
#include "echelon/models/layers.h"
#include "echelon/parallel/tensor/conv.h"

namespace echelon::models {
namespace {

// Convolutions of so few channels take a third less time on CPUs when the
// channels of a pixel lie together, if freed memory is kept (else about the
// same); pooling and ReLU keep that order. Residual networks gain nothing.
bool gains_by_channels_last(const torch::Tensor& x) {
  return computing_device(x) == torch::kCPU &&
         x.scalar_type() == torch::kFloat32;
}

// Of one channel both orders are the same memory, and only strides tell
// operators which one they shall keep.
torch::Tensor with_channels_last(const torch::Tensor& x) {
  if (!gains_by_channels_last(x)) return x;
  if (x.dim() != 4 || x.size(1) != 1) {
    return x.contiguous(at::MemoryFormat::ChannelsLast);
  }
  return x.contiguous()
      .view({x.size(0), x.size(2), x.size(3), 1})
      .permute({0, 3, 1, 2});
}

// From the flat layer and from another stage gradients come in the other order;
// the backward of pooling would copy its whole input twice for that.
torch::Tensor gradients_with_channels_last(const torch::Tensor& y) {
  if (y.requires_grad() && gains_by_channels_last(y)) {
    y.register_hook([](const torch::Tensor& gradient) {
      return gradient.contiguous(at::MemoryFormat::ChannelsLast);
    });
  }
  return y;
}

void add_conv(
    LayerList& layers, const std::string& name, const ConvShape& shape,
    Channels from, const TensorParallel& parallel) {
  layers.add(
      name,
      [name, shape, from, parallel] {
        return std::make_shared<ParallelConv2d>(
            shape, parallel, name, from, Channels::cut);
      },
      [](ParallelConv2d& conv, const torch::Tensor& x) {
        return gradients_with_channels_last(
            at::max_pool2d(at::relu(conv.forward(with_channels_last(x))), 2));
      });
}

}  // namespace

LayerList simple_cnn_layers(
    const std::vector<int64_t>& image, int64_t classes,
    const TensorParallel& parallel) {
  LayerList layers;
  add_conv(
      layers, "conv1", {.in = image[0], .out = 16}, Channels::replicated,
      parallel);
  add_conv(layers, "conv2", {.in = 16, .out = 32}, Channels::cut, parallel);
  const int64_t pixels = (image[1] / 4) * (image[2] / 4);
  layers.add(
      "fc",
      [pixels, classes, parallel] {
        return scores_of_channels(32, pixels, classes, parallel);
      },
      [](RowParallelLinear& fc, const torch::Tensor& x) {
        return fc.forward(x.flatten(1));
      });
  return layers;
}

}  // namespace echelon::models
