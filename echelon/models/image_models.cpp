// The layers of image networks and of "mlp". In a tensor-parallel group a
// convolution computes this rank's channels, and the last layer sums over them.
// So images stay sharded by channels from the first convolution to the last
// layer, and batch norms, ReLU, pooling and residual sums send nothing to the
// ranks of the group. The modules of residual networks have torchvision's
// names.
#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "echelon/layers/channels_last.h"
#include "echelon/layers/computing_device.h"
#include "echelon/layers/low_precision.h"
#include "echelon/models/build.h"
#include "echelon/parallel/tensor/conv.h"
#include "echelon/parallel/tensor/linear.h"

namespace echelon::models {
namespace {

// Serves layers whose activations are not sharded by tokens.
TensorParallel without_sequence_parallel(TensorParallel parallel) {
  parallel.options.sequence_parallel = false;
  return parallel;
}

// The last layer of an image network: from images of this rank's channels,
// flat [batch, channels_r * pixels], to scores [batch, classes] on every rank.
// Weights are not initialised.
std::shared_ptr<RowParallelLinear> scores_of_channels(
    int64_t channels, int64_t pixels, int64_t classes,
    const TensorParallel& parallel) {
  const auto mine = parallel.part_of(channels);
  const IndexRange features{mine.begin * pixels, mine.end * pixels};
  return std::make_shared<RowParallelLinear>(
      LinearShape{.in = channels * pixels, .out = classes},
      without_sequence_parallel(parallel), "fc",
      Shard{.pieces = {features}, .owned = {features}});
}

// simple_cnn

// Convolutions of so few channels take a third less time on CPUs when the
// channels of a pixel lie together, if freed memory is kept (else about the
// same); pooling and ReLU keep that order. Residual networks gain nothing on
// CPUs.
bool gains_by_channels_last(const torch::Tensor& x) {
  return prefers_channels_last(x) || (computing_device(x) == torch::kCPU &&
                                      x.scalar_type() == torch::kFloat32);
}

// Gradients from a flat layer, from a mean and from another stage come in the
// other order, for which the backward of pooling would copy its whole input
// twice.
torch::Tensor gradients_with_channels_last(const torch::Tensor& y) {
  if (y.requires_grad()) {
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
            shape, parallel, name, from, Channels::sharded);
      },
      [](ParallelConv2d& conv, const torch::Tensor& x) {
        const bool last = gains_by_channels_last(x);
        const auto y = at::max_pool2d(
            at::relu(conv.forward(last ? with_channels_last(x) : x)), 2);
        return last ? gradients_with_channels_last(y) : y;
      });
}

// mlp

// ReLU works in place only without tensor parallelism: sharded matmuls return a
// view.
torch::Tensor relu(torch::Tensor y, const TensorParallel& parallel) {
  return parallel.size() == 1 ? at::relu_(y) : at::relu(y);
}

// Layer 2 i + 1 is sharded by its outputs and layer 2 i + 2 by its inputs. The
// features between the two are sharded; all others are on every rank.
void add_column_parallel(
    LayerList& layers, const std::string& name, const LinearShape& shape,
    bool first, bool last, const TensorParallel& parallel) {
  layers.add(
      name,
      [name, shape, last, parallel] {
        return std::make_shared<ColumnParallelLinear>(
            shape, parallel, name, /*gather_output=*/last);
      },
      [first, last, parallel](
          ColumnParallelLinear& fc, const torch::Tensor& x) {
        const auto y = fc.forward(first ? x.flatten(1) : x);
        return last ? y : relu(y, parallel);
      });
}

void add_row_parallel(
    LayerList& layers, const std::string& name, const LinearShape& shape,
    bool last, const TensorParallel& parallel) {
  layers.add(
      name,
      [name, shape, parallel] {
        return std::make_shared<RowParallelLinear>(shape, parallel, name);
      },
      [last, parallel](RowParallelLinear& fc, const torch::Tensor& x) {
        const auto y = fc.forward(x);
        return last ? y : relu(y, parallel);
      });
}

// resnet

// A layer's name, and the ranks that compute it.
struct Place {
  std::string name;
  TensorParallel parallel;
};

// A convolution followed by batch normalisation, registered in `owner` under
// the two names; both compute this rank's channels.
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
                       Channels::sharded, Channels::sharded));
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
// of x, and the sum over a large image overflows fp16.
torch::Tensor mean_of_pixels(const torch::Tensor& images) {
  const auto x = prefers_channels_last(images)
                     ? gradients_with_channels_last(images)
                     : images;
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
        parallel, "conv1", Channels::replicated, Channels::sharded);
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

LayerList simple_cnn_layers(
    const std::vector<int64_t>& image, int64_t classes,
    const TensorParallel& parallel) {
  LayerList layers;
  add_conv(
      layers, "conv1", {.in = image[0], .out = 16}, Channels::replicated,
      parallel);
  add_conv(layers, "conv2", {.in = 16, .out = 32}, Channels::sharded, parallel);
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

LayerList mlp_layers(
    int64_t features, const std::vector<int64_t>& hidden, int64_t classes,
    const TensorParallel& parallel) {
  const auto plain = without_sequence_parallel(parallel);
  LayerList layers;
  int64_t in = features;
  for (size_t i = 0; i <= hidden.size(); ++i) {
    const bool last = i == hidden.size();
    const LinearShape shape{.in = in, .out = last ? classes : hidden[i]};
    const std::string name = "fc" + std::to_string(i + 1);
    if (i % 2 == 0) {
      add_column_parallel(layers, name, shape, i == 0, last, plain);
    } else {
      add_row_parallel(layers, name, shape, last, plain);
    }
    in = shape.out;
  }
  return layers;
}

LayerList resnet_layers(
    const ResnetConfig& config, int64_t channels, int64_t classes,
    const TensorParallel& parallel) {
  LayerList layers;
  add_stem(layers, channels, parallel);
  BlockShape shape{.bottleneck = config.bottleneck};
  for (size_t group = 0; group < config.blocks.size(); ++group) {
    const std::string prefix = "layer" + std::to_string(group + 1) + ".";
    shape.width = int64_t{64} << group;
    shape.out = config.bottleneck ? 4 * shape.width : shape.width;
    for (int64_t index = 0; index < config.blocks[group]; ++index) {
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
