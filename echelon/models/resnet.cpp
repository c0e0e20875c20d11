#include <optional>

#include "echelon/layers/low_precision.h"
#include "echelon/models/build.h"
#include "echelon/models/layers.h"
#include "echelon/parallel/tensor/conv.h"

namespace echelon::models {
namespace {

// Where a layer is: what it is called, and who computes it.
struct Place {
  std::string name;
  TensorParallel parallel;
};

// A convolution with the batch normalisation behind it, registered in `owner`
// under the two names; both on this rank's channels.
class ConvNorm {
 public:
  ConvNorm(
      torch::nn::Module& owner, const Place& place,
      const std::string& conv_name, const std::string& norm_name,
      ConvShape shape) {
    shape.bias = false;
    conv_ = owner.register_module(
        conv_name, std::make_shared<ParallelConv2d>(
                       shape, place.parallel, place.name + "." + conv_name,
                       Channels::cut, Channels::cut));
    norm_ = owner.register_module(
        norm_name,
        std::make_shared<ParallelBatchNorm2d>(
            shape.out, place.parallel, place.name + "." + norm_name));
  }

  torch::Tensor forward(const torch::Tensor& x) const {
    return norm_->forward(conv_->forward(x));
  }

 private:
  std::shared_ptr<ParallelConv2d> conv_;
  std::shared_ptr<ParallelBatchNorm2d> norm_;
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
  ResidualBlock(const BlockShape& shape, const Place& place) {
    auto add = [&](int64_t in, int64_t out, int64_t kernel, int64_t stride) {
      const std::string number = std::to_string(branch_.size() + 1);
      branch_.emplace_back(
          *this, place, "conv" + number, "bn" + number,
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
          *holder, Place{place.name + ".downsample", place.parallel}, "0", "1",
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

// [batch, channels, h, w] -> [batch, channels]. LibTorch would sum in the dtype
// of x, and the pixels of a large image overflow fp16.
torch::Tensor mean_of_pixels(const torch::Tensor& x) {
  if (!is_low_precision(x.scalar_type())) {
    return at::adaptive_avg_pool2d(x, {1, 1}).flatten(1);
  }
  return at::mean(x, {2, 3}, false, torch::kFloat32).to(x.scalar_type());
}

// conv1 7x7, bn1 with ReLU and 3x3 max-pooling: a quarter of the image's size.
void add_stem(
    LayerList& layers, int64_t channels, const TensorParallel& parallel) {
  layers.add("conv1", [channels, parallel] {
    return std::make_shared<ParallelConv2d>(
        ConvShape{
            .in = channels, .out = 64, .kernel = 7, .stride = 2, .bias = false},
        parallel, "conv1", Channels::replicated, Channels::cut);
  });
  layers.add(
      "bn1",
      [parallel] {
        return std::make_shared<ParallelBatchNorm2d>(64, parallel, "bn1");
      },
      [](BatchNorm2d& norm, const torch::Tensor& x) {
        return at::max_pool2d(norm.forward(x).relu_(), 3, 2, 1);
      });
}

}  // namespace

LayerList resnet_layers(
    const ResnetPlan& plan, int64_t channels, int64_t classes,
    const TensorParallel& parallel) {
  LayerList layers;
  add_stem(layers, channels, parallel);
  BlockShape shape{.bottleneck = plan.bottleneck};
  for (size_t group = 0; group < plan.blocks.size(); ++group) {
    const std::string prefix = "layer" + std::to_string(group + 1) + ".";
    shape.width = int64_t{64} << group;
    shape.out = plan.bottleneck ? 4 * shape.width : shape.width;
    for (int64_t index = 0; index < plan.blocks[group]; ++index) {
      shape.stride = group > 0 && index == 0 ? 2 : 1;
      const Place place{prefix + std::to_string(index), parallel};
      layers.add(place.name, [shape, place] {
        return std::make_shared<ResidualBlock>(shape, place);
      });
      shape.in = shape.out;
    }
  }
  layers.add(
      "fc",
      [in = shape.in, classes, parallel] {
        return scores_of_channels(in, 1, classes, parallel);
      },
      [](RowParallelLinear& fc, const torch::Tensor& x) {
        return fc.forward(mean_of_pixels(x));
      });
  return layers;
}

}  // namespace echelon::models
