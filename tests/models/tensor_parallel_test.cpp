// Image networks and "mlp" sharded over ranks, compared with one device.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <atomic>
#include <optional>
#include <vector>

#include "echelon/counting/layer_cost.h"
#include "echelon/layers/channels_last.h"
#include "echelon/layers/network.h"
#include "echelon/models/make_network.h"
#include "tests/parallel/tensor/parts.h"
#include "tests/support/error_text.h"

namespace echelon::tensor_parallel_test {

using testing::AllOf;
using testing::HasSubstr;
using torch::Tensor;

constexpr uint64_t kSeed = 3;
constexpr int64_t kClasses = 7;

struct Model {
  const char* name;
  std::vector<int64_t> input;
};

void PrintTo(const Model& model, std::ostream* out) {
  *out << model.name;
}

ModelOptions options_of(const Model& model) {
  ModelOptions options;
  options.name = model.name;
  options.hidden = {13, 9, 6};
  options.dtype = ModelDtype::float64;
  return options;
}

std::shared_ptr<Network>
build(const Model& model, const TensorParallel& parallel) {
  const auto layers =
      model_layers(options_of(model), model.input, kClasses, parallel);
  return build_network(layers, 0, layers.size(), kSeed);
}

Tensor batch_of(const Model& model) {
  std::vector<int64_t> shape = {4};
  shape.insert(shape.end(), model.input.begin(), model.input.end());
  return parity::random(shape, 5);
}

// Forward and backward of a loss that is equal on all ranks.
Tensor step(Network& network, const Tensor& x) {
  const auto scores = network.forward(x);
  const auto targets = torch::arange(4) % kClasses;
  torch::nn::functional::cross_entropy(scores, targets).backward();
  return scores;
}

class TensorParallelModel : public testing::TestWithParam<Model> {};
INSTANTIATE_TEST_SUITE_P(
    Models, TensorParallelModel,
    testing::Values(
        Model{"simple_cnn", {1, 12, 9}}, Model{"simple_cnn", {3, 16, 16}},
        Model{"mlp", {2, 5}}, Model{"resnet18", {3, 33, 33}},
        Model{"resnet50", {3, 33, 33}}),
    [](const auto& info) {
      return info.param.name + std::to_string(info.index);
    });

// One device computes with channels first, ranks with them last if asked.
void expect_equals_one_device(
    const Model& model, const std::vector<int>& degrees, bool channels_last) {
  const auto one = build(model, {});
  parity::NamedTensors full;
  for (const auto& item : one->named_parameters()) {
    full[item.key()] = item.value();
  }
  const auto x = batch_of(model);
  const auto scores = step(*one, x);
  const auto buffers = one->named_buffers();

  std::optional<ChannelsLastEverywhere> everywhere;
  if (channels_last) everywhere.emplace();
  for (const int ranks : degrees) {
    SCOPED_TRACE(ranks);
    parity::on_ranks({ranks, {}}, [&](const TensorParallel& parallel) {
      const auto network = build(model, parallel);
      const auto shards = shards_of(*network);
      for (const auto& item : network->named_parameters()) {
        const auto& shard = shards.at(item.key()).shard;
        EXPECT_TRUE(item.value().equal(slice_of(full.at(item.key()), shard)))
            << item.key();
      }
      const auto y = step(*network, x);
      parity::expect_tensor("scores", scores, y, 1e-10);
      parity::expect_parts(*network, full, 1e-10);
      for (const auto& item : network->named_buffers()) {
        const auto found = shards.find(item.key());
        const auto& expected = buffers[item.key()];
        parity::expect_tensor(
            item.key(),
            found == shards.end() ? expected
                                  : slice_of(expected, found->second.shard),
            item.value(), 1e-10);
      }
    });
  }
}

TEST_P(TensorParallelModel, EqualsThatOfOneDevice) {
  const bool large = std::string(GetParam().name).starts_with("resnet");
  expect_equals_one_device(
      GetParam(), large ? std::vector<int>{2, 3} : std::vector<int>{1, 2, 3, 4},
      false);
}

// So GPUs compute in 16 bits.
TEST_P(TensorParallelModel, EqualsThatOfOneDeviceWithChannelsLast) {
  expect_equals_one_device(GetParam(), {1, 2, 3}, true);
}

// No layer of an image network brings its images back into the other order,
// forward or backward.
TEST_P(TensorParallelModel, ImagesStayChannelsLast) {
  if (GetParam().input.size() != 3) GTEST_SKIP() << "no images";
  const ChannelsLastEverywhere everywhere;
  const auto last = [](const Tensor& images) {
    return images.dim() != 4 ||
           images.is_contiguous(at::MemoryFormat::ChannelsLast);
  };
  parity::on_ranks({2, {}}, [&](const TensorParallel& parallel) {
    const auto list = model_layers(
        options_of(GetParam()), GetParam().input, kClasses, parallel);
    Tensor y = with_channels_last(batch_of(GetParam()));
    std::vector<BuiltLayer> built;
    for (const auto& layer : list.layers()) {
      built.push_back(layer.build());
      torch::NoGradGuard no_grad;
      for (auto& one : built.back().module->parameters()) {
        one.copy_(parity::random(one.sizes(), 1));
      }
      built.back().module->to(torch::kFloat64);
    }
    std::vector<Tensor> images;
    for (const auto& layer : built) {
      y = layer.forward({y})[0];
      images.push_back(y);
    }
    // After those of the layers themselves.
    for (size_t i = 0; i < images.size(); ++i) {
      const auto& name = list.layers()[i].name;
      EXPECT_TRUE(last(images[i])) << name << ": " << images[i].strides();
      images[i].register_hook([&last, name](const Tensor& gradient) {
        EXPECT_TRUE(last(gradient))
            << "gradient of " << name << ": " << gradient.strides();
      });
    }
    y.sum().backward();
  });
}

// The flops of all ranks together are those of one device.
TEST_P(TensorParallelModel, RanksPartitionTheWork) {
  const auto flops = [&](const TensorParallel& parallel) {
    const auto layers = model_layers(
        options_of(GetParam()), GetParam().input, kClasses, parallel);
    auto shape = GetParam().input;
    shape.insert(shape.begin(), 4);
    double sum = 0;
    for (const auto& cost :
         counting::count_layers(layers, {{shape, torch::kFloat64}})) {
      sum += cost.flops();
    }
    return sum;
  };
  const double full = flops({});
  std::atomic<double> sum = 0;
  parity::on_ranks(
      {3, {}}, [&](const TensorParallel& parallel) { sum += flops(parallel); });
  EXPECT_DOUBLE_EQ(sum, full);
}

TEST(TensorParallelModel, MoreRanksThanChannelsAreNamed) {
  const auto error = error_text<ConfigError>([] {
    parity::on_ranks({17, {}}, [](const TensorParallel& parallel) {
      build({"simple_cnn", {1, 8, 8}}, parallel);
    });
  });
  EXPECT_THAT(
      error, AllOf(
                 HasSubstr("tp=17"), HasSubstr("conv1"),
                 HasSubstr("16 channels"), HasSubstr("1 to 16")));
}

TEST(TensorParallelModel, ImageModelsIgnoreSequenceParallelism) {
  const Model model{"simple_cnn", {1, 12, 9}};
  const auto scores = build(model, {})->forward(batch_of(model));
  const parity::Way way{2, {.sequence_parallel = true, .overlap_chunks = 2}};
  parity::on_ranks(way, [&](const TensorParallel& parallel) {
    parity::expect_tensor(
        "scores", scores, build(model, parallel)->forward(batch_of(model)));
  });
}

}  // namespace echelon::tensor_parallel_test
