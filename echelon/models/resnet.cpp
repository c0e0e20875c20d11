#include <optional>

#include "echelon/models/build.h"
#include "echelon/models/layers.h"

namespace echelon::models {
namespace {

// A convolution with the batch normalisation behind it, registered in `owner`
// under the two names.
class ConvNorm {
 public:
  ConvNorm(
      torch::nn::Module& owner,
      const Network& network,
      const std::string& conv_name,
      const std::string& norm_name,
      ConvShape shape)
      : network_(&network) {
    shape.bias = false;
    conv_ = owner.register_module(conv_name, std::make_shared<Conv2d>(shape));
    norm_ = owner.register_module(
        norm_name, std::make_shared<torch::nn::BatchNorm2dImpl>(shape.out));
  }

  torch::Tensor forward(const torch::Tensor& x) const {
    return network_->batch_norm(*norm_, conv_->forward(x));
  }

 private:
  const Network* network_;  // owns the module that owns this
  std::shared_ptr<Conv2d> conv_;
  std::shared_ptr<torch::nn::BatchNorm2dImpl> norm_;
};

struct BlockShape {
  int64_t in = 64;
  int64_t width = 64;
  int64_t out = 64;
  int64_t stride = 1;
  bool bottleneck = false;
};

// relu(branch(x) + x): the branch is two 3x3 convolutions, or 1x1, 3x3, 1x1;
// x passes a 1x1 convolution ("downsample") where its shape must change.
class ResidualBlock : public torch::nn::Module {
 public:
  ResidualBlock(const Network& network, const BlockShape& shape) {
    auto add = [&](int64_t in, int64_t out, int64_t kernel, int64_t stride) {
      const std::string number = std::to_string(branch_.size() + 1);
      branch_.emplace_back(
          *this,
          network,
          "conv" + number,
          "bn" + number,
          ConvShape{.in = in, .out = out, .kernel = kernel, .stride = stride});
    };
    if (shape.bottleneck) {
      add(shape.in, shape.width, 1, 1);
      add(shape.width, shape.width, 3, shape.stride);
      add(shape.width, shape.out, 1, 1);
    } else {
      add(shape.in, shape.width, 3, shape.stride);
      add(shape.width, shape.out, 3, 1);
    }
    if (shape.in != shape.out || shape.stride != 1) {
      auto holder =
          register_module("downsample", std::make_shared<torch::nn::Module>());
      shortcut_.emplace(
          *holder,
          network,
          "0",
          "1",
          ConvShape{
              .in = shape.in,
              .out = shape.out,
              .kernel = 1,
              .stride = shape.stride});
    }
  }

  torch::Tensor forward(const torch::Tensor& x) const {
    torch::Tensor y = x;
    for (size_t i = 0; i + 1 < branch_.size(); ++i) {
      y = branch_[i].forward(y).relu_();
    }
    y = branch_.back().forward(y);
    y += shortcut_ ? shortcut_->forward(x) : x;
    return y.relu_();
  }

 private:
  std::vector<ConvNorm> branch_;
  std::optional<ConvNorm> shortcut_;
};

// conv1 7x7, bn1 with ReLU and 3x3 max-pooling: a quarter of the image's size.
void append_stem(Network& network, int64_t channels) {
  auto conv = network.register_module(
      "conv1",
      std::make_shared<Conv2d>(ConvShape{
          .in = channels, .out = 64, .kernel = 7, .stride = 2, .bias = false}));
  auto norm = network.register_module(
      "bn1", std::make_shared<torch::nn::BatchNorm2dImpl>(64));
  network.append(
      "conv1", [conv](const torch::Tensor& x) { return conv->forward(x); });
  network.append("bn1", [norm, &network](const torch::Tensor& x) {
    return at::max_pool2d(network.batch_norm(*norm, x).relu_(), 3, 2, 1);
  });
}

}  // namespace

void build_resnet(
    Network& network,
    const ResnetPlan& plan,
    int64_t channels,
    int64_t classes) {
  append_stem(network, channels);
  BlockShape shape{.bottleneck = plan.bottleneck};
  for (size_t group = 0; group < plan.blocks.size(); ++group) {
    const std::string name = "layer" + std::to_string(group + 1);
    auto holder =
        network.register_module(name, std::make_shared<torch::nn::Module>());
    shape.width = int64_t{64} << group;
    shape.out = plan.bottleneck ? 4 * shape.width : shape.width;
    for (int64_t index = 0; index < plan.blocks[group]; ++index) {
      shape.stride = group > 0 && index == 0 ? 2 : 1;
      const std::string number = std::to_string(index);
      auto block = holder->register_module(
          number, std::make_shared<ResidualBlock>(network, shape));
      network.append(name + "." + number, [block](const torch::Tensor& x) {
        return block->forward(x);
      });
      shape.in = shape.out;
    }
  }
  auto fc = network.register_module(
      "fc", std::make_shared<Linear>(shape.in, classes));
  network.append("fc", [fc](const torch::Tensor& x) {
    return fc->forward(at::adaptive_avg_pool2d(x, {1, 1}).flatten(1));
  });
}

}  // namespace echelon::models
