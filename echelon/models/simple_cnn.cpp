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

void append_conv(
    Network& network, const std::string& name, int64_t in, int64_t out) {
  auto conv = network.register_module(
      name, std::make_shared<Conv2d>(ConvShape{.in = in, .out = out}));
  network.append(name, [conv](const torch::Tensor& x) {
    return at::max_pool2d(at::relu(conv->forward(with_channels_last(x))), 2);
  });
}

}  // namespace

void build_simple_cnn(
    Network& network, const std::vector<int64_t>& image, int64_t classes) {
  append_conv(network, "conv1", image[0], 16);
  append_conv(network, "conv2", 16, 32);
  auto fc = network.register_module(
      "fc",
      std::make_shared<Linear>(32 * (image[1] / 4) * (image[2] / 4), classes));
  network.append(
      "fc", [fc](const torch::Tensor& x) { return fc->forward(x.flatten(1)); });
}

}  // namespace echelon::models
