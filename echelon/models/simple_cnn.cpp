#include "echelon/models/build.h"
#include "echelon/models/layers.h"

namespace echelon::models {
namespace {

// Convolutions of so few channels take a third less time on CPUs when the
// channels of a pixel lie together, if freed memory is kept (else about the
// same); pooling and ReLU keep that order. Residual networks gain nothing.
torch::Tensor with_channels_last(const torch::Tensor& x) {
  const bool faster = x.is_cpu() && x.scalar_type() == torch::kFloat32;
  return faster ? x.contiguous(at::MemoryFormat::ChannelsLast) : x;
}

void add_conv(
    LayerList& layers, const std::string& name, int64_t in, int64_t out) {
  layers.add(
      name,
      [in, out] {
        return std::make_shared<Conv2d>(ConvShape{.in = in, .out = out});
      },
      [](const Conv2d& conv, const torch::Tensor& x) {
        return at::max_pool2d(at::relu(conv.forward(with_channels_last(x))), 2);
      });
}

}  // namespace

LayerList
simple_cnn_layers(const std::vector<int64_t>& image, int64_t classes) {
  LayerList layers;
  add_conv(layers, "conv1", image[0], 16);
  add_conv(layers, "conv2", 16, 32);
  const int64_t features = 32 * (image[1] / 4) * (image[2] / 4);
  layers.add(
      "fc",
      [features, classes] {
        return std::make_shared<Linear>(features, classes);
      },
      [](const Linear& fc, const torch::Tensor& x) {
        return fc.forward(x.flatten(1));
      });
  return layers;
}

}  // namespace echelon::models
