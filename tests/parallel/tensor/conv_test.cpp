#include "echelon/parallel/tensor/conv.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <cmath>
#include <utility>

#include "echelon/layers/channels_last.h"
#include "tests/parallel/tensor/parts.h"
#include "tests/support/error_text.h"

namespace echelon::conv_test {

using torch::Tensor;

constexpr uint64_t kSeed = 9;

std::vector<parity::Way> degrees() {
  return {{1, {}}, {2, {}}, {3, {}}, {4, {}}};
}

class ConvParity : public testing::TestWithParam<parity::Way> {};
INSTANTIATE_TEST_SUITE_P(
    Degrees, ConvParity, testing::ValuesIn(degrees()),
    testing::PrintToStringParamName());

// This rank's channels.
Tensor part_of(
    const Tensor& whole, Channels channels, const TensorParallel& parallel) {
  if (channels == Channels::replicated) return whole;
  const auto mine = parallel.part_of(whole.size(1));
  return whole.narrow(1, mine.begin, mine.size());
}

void expect_plain(
    const ConvShape& shape, Channels from, Channels to,
    const TensorParallel& parallel) {
  ParallelConv2d layer(shape, parallel, "conv", from, to);
  const auto whole = parity::give_parts(layer, kSeed);
  const auto x = parity::random({2, shape.in, 7, 6}, 1);
  const auto plain = [&](const Tensor& x) {
    return at::conv2d(
        x, whole.at("weight"), shape.bias ? whole.at("bias") : Tensor(),
        shape.stride, shape.kernel / 2);
  };
  parity::expect_layer(
      layer, parallel, whole,
      {.x = x,
       .cotangent = parity::random(plain(x).sizes(), 2),
       .part_of_x = [&](auto& all) { return part_of(all, from, parallel); },
       .part_of_y = [&](auto& all) { return part_of(all, to, parallel); }},
      plain, [&](const Tensor& x) { return layer.forward(x); });
}

void expect_every_sharding(const parity::Way& way) {
  const std::vector<ConvShape> shapes = {
      {.in = 8, .out = 8},
      {.in = 5, .out = 7},                            // by outputs
      {.in = 7, .out = 5, .bias = false},             // by inputs
      {.in = 5, .out = 9, .kernel = 1, .stride = 2},  // by inputs
      {.in = 4, .out = 6, .kernel = 5, .stride = 3, .bias = false},
  };
  parity::on_ranks(way, [&](const TensorParallel& parallel) {
    for (const auto& shape : shapes) {
      for (const auto from : {Channels::replicated, Channels::sharded}) {
        for (const auto to : {Channels::replicated, Channels::sharded}) {
          SCOPED_TRACE(shape.in * 100 + shape.out);
          expect_plain(shape, from, to, parallel);
        }
      }
    }
  });
}

TEST_P(ConvParity, EverySharding) {
  expect_every_sharding(GetParam());
}

// GPUs convolve so in 16 bits. Some ranks have one channel, whose strides do
// not tell the order.
TEST_P(ConvParity, EveryShardingWithChannelsLast) {
  const ChannelsLastEverywhere everywhere;
  expect_every_sharding(GetParam());
}

TEST_P(ConvParity, ChannelsStayLast) {
  const ChannelsLastEverywhere everywhere;
  const auto last = [](const Tensor& images) {
    return images.is_contiguous(at::MemoryFormat::ChannelsLast) &&
           !images.is_contiguous();
  };
  parity::on_ranks(GetParam(), [&](const TensorParallel& parallel) {
    for (const ConvShape& shape :
         {ConvShape{.in = 8, .out = 8}, ConvShape{.in = 8, .out = 17}}) {
      for (const auto from : {Channels::replicated, Channels::sharded}) {
        for (const auto to : {Channels::replicated, Channels::sharded}) {
          ParallelConv2d layer(shape, parallel, "conv", from, to);
          parity::give_parts(layer, kSeed);
          const auto x =
              with_channels_last(
                  part_of(
                      parity::random({2, shape.in, 7, 6}, 1), from, parallel))
                  .requires_grad_();
          const auto y = layer.forward(x);
          EXPECT_TRUE(last(y)) << y.strides();
          const auto gradient = torch::autograd::grad(
              {y}, {x}, {with_channels_last(torch::ones_like(y))});
          EXPECT_TRUE(last(gradient[0])) << gradient[0].strides();
        }
      }
    }
  });
}

// Strides of one rank's channels do not tell what the others do.
TEST_P(ConvParity, RanksMayHaveDifferentStrides) {
  parity::on_ranks(GetParam(), [&](const TensorParallel& parallel) {
    for (const auto from : {Channels::replicated, Channels::sharded}) {
      for (const auto to : {Channels::replicated, Channels::sharded}) {
        ParallelConv2d layer({.in = 8, .out = 8}, parallel, "conv", from, to);
        parity::give_parts(layer, kSeed);
        const auto step = [&](Tensor x) {
          x = x.detach().requires_grad_();
          const auto y = layer.forward(x);
          return std::pair(y, torch::autograd::grad({y.sin().sum()}, {x})[0]);
        };
        const auto x = part_of(parity::random({2, 8, 7, 6}, 1), from, parallel)
                           .contiguous();
        const auto [y, gradient] = step(x);
        const auto [other_y, other_gradient] =
            step(parallel.rank() == 1 ? with_channels_last(x) : x);
        parity::expect_tensor("y", y, other_y);
        parity::expect_tensor("gradient of x", gradient, other_gradient);
      }
    }
  });
}

TEST(ParallelConv, OrderIsThatOfTheDeviceAndTheDtype) {
  const auto images = [](torch::Dtype dtype, torch::Device device) {
    return torch::empty({2, 3, 4, 5}, torch::dtype(dtype).device(device));
  };
  EXPECT_FALSE(prefers_channels_last(images(torch::kBFloat16, torch::kCPU)));
  EXPECT_FALSE(prefers_channels_last(images(torch::kBFloat16, torch::kMeta)));
  const CountedFor gpu(torch::kCUDA);
  EXPECT_TRUE(prefers_channels_last(images(torch::kBFloat16, torch::kMeta)));
  EXPECT_TRUE(prefers_channels_last(images(torch::kHalf, torch::kMeta)));
  EXPECT_FALSE(prefers_channels_last(images(torch::kFloat32, torch::kMeta)));
  EXPECT_FALSE(
      prefers_channels_last(images(torch::kBFloat16, torch::kMeta)[0]));
}

TEST(ParallelConv, SendsTheSmallerTensor) {
  const auto shards_inputs = [](const ConvShape& shape) {
    return ParallelConv2d(
               shape, {}, "conv", Channels::sharded, Channels::sharded)
        .shards_inputs();
  };
  EXPECT_TRUE(shards_inputs({.in = 8, .out = 8}));
  EXPECT_FALSE(shards_inputs({.in = 8, .out = 16}));
  EXPECT_TRUE(shards_inputs({.in = 8, .out = 16, .stride = 2}));
}

TEST_P(ConvParity, BatchNormOfShardedChannels) {
  const auto x_whole = parity::random({3, 5, 4, 4}, 1).requires_grad_();
  const auto weights = parity::random(x_whole.sizes(), 2);
  torch::nn::BatchNorm2d plain(5);
  {
    ParallelBatchNorm2d one(5, {}, "bn");
    for (const auto& [name, value] : parity::give_parts(one, kSeed)) {
      plain->named_parameters()[name].set_data(value.detach().clone());
    }
  }
  plain->to(torch::kFloat64);
  const auto y_whole = plain->forward(x_whole);
  (y_whole * weights).sum().backward();
  parity::NamedTensors whole = {
      {"weight", plain->weight}, {"bias", plain->bias}};

  parity::on_ranks(GetParam(), [&](const TensorParallel& parallel) {
    ParallelBatchNorm2d layer(5, parallel, "bn");
    parity::give_parts(layer, kSeed);
    const auto x = part_of(x_whole.detach(), Channels::sharded, parallel)
                       .clone()
                       .requires_grad_();
    const auto y = layer.forward(x);
    (y * part_of(weights, Channels::sharded, parallel)).sum().backward();
    parity::expect_tensor(
        "output", part_of(y_whole, Channels::sharded, parallel), y);
    parity::expect_tensor(
        "gradient of the input",
        part_of(x_whole.grad(), Channels::sharded, parallel), x.grad());
    parity::expect_parts(layer, whole);
    const auto shards = shards_of(layer);
    EXPECT_EQ(shards.size(), 4u);
    for (const char* name : {"running_mean", "running_var"}) {
      parity::expect_tensor(
          name, slice_of(plain->named_buffers()[name], shards.at(name).shard),
          layer.named_buffers()[name]);
    }
  });
}

TEST_P(ConvParity, InitialValuesAreSlices) {
  const ConvShape shape{.in = 6, .out = 5};
  ParallelConv2d conv(shape, {}, "conv", Channels::sharded, Channels::sharded);
  ParallelBatchNorm2d norm(5, {}, "norm");
  initialize_shards(conv, "conv.", 4);
  initialize_shards(norm, "norm.", 4);
  EXPECT_LE(conv.weight.abs().max().item<double>(), 1 / std::sqrt(54.0));
  EXPECT_GT(conv.weight.abs().max().item<double>(), 0.1);
  EXPECT_TRUE(norm.weight.equal(torch::ones({5})));
  EXPECT_TRUE(norm.running_var.equal(torch::ones({5})));
  EXPECT_TRUE(norm.bias.equal(torch::zeros({5})));
  parity::on_ranks(GetParam(), [&](const TensorParallel& parallel) {
    ParallelConv2d part(
        shape, parallel, "conv", Channels::sharded, Channels::sharded);
    initialize_shards(part, "conv.", 4);
    for (const auto& [name, shard] : shards_of(part)) {
      EXPECT_TRUE(part.named_parameters()[name].equal(
          slice_of(conv.named_parameters()[name], shard.shard)))
          << name;
    }
  });
}

TEST(ParallelConv, NamesMoreRanksThanChannels) {
  const auto error = error_text<ConfigError>([] {
    run_ranks(3, [](World& world) {
      ParallelConv2d(
          {.in = 8, .out = 2}, {.group = world.group()}, "layer1.0.conv1",
          Channels::replicated, Channels::sharded);
    });
  });
  EXPECT_THAT(error, HasAll("tp=3", "layer1.0.conv1", "2 channels", "1 to 2"));
}

}  // namespace echelon::conv_test
