#include <gmock/gmock.h>
#include <torch/torch.h>

#include <atomic>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "echelon/counting/layer_cost.h"
#include "echelon/counting/meta_mode.h"
#include "tests/support/error_text.h"

namespace echelon::counting::layer_cost_test {

TEST(BuildOnMeta, MakesNoMemory) {
  const LayerDefinition layer{
      "block", [] {
        torch::nn::Sequential block(
            torch::nn::Linear(1 << 16, 1 << 17),
            torch::nn::Conv2d(torch::nn::Conv2dOptions(1 << 10, 1 << 10, 31)),
            torch::nn::BatchNorm2d(8), torch::nn::Embedding(1 << 20, 1 << 10));
        return BuiltLayer{block.ptr(), nullptr};
      }};
  const auto built = build_on_meta(layer);
  int64_t numel = 0;
  for (const auto& item : built.module->named_parameters()) {
    EXPECT_TRUE(item.value().is_meta()) << item.key();
    numel += item.value().numel();
  }
  EXPECT_GT(numel, int64_t{10'000'000'000});
  for (const auto& item : built.module->named_buffers()) {
    EXPECT_TRUE(item.value().is_meta()) << item.key();
  }
  // Afterwards tensors are real again.
  EXPECT_TRUE(torch::ones({2}).is_cpu());
}

TEST(BuildOnMeta, LeavesSharedTensorsUnchanged) {
  const auto shared = torch::nn::Linear(3, 3);
  LayerList layers;
  layers.add("first", [=] { return shared; });
  layers.add("second", [=] { return shared; });
  const auto a = build_on_meta(layers[0]).module->parameters()[0];
  const auto b = build_on_meta(layers[1]).module->parameters()[0];
  EXPECT_TRUE(a.is_cpu());
  EXPECT_TRUE(a.is_alias_of(b));
}

TEST(BuildOnMeta, NamesTheLayerThatNeedsData) {
  const LayerDefinition layer{"table", [] {
                                auto values = torch::ones({4});
                                values.data_ptr<float>()[0] = 2.0F;
                                return BuiltLayer{};
                              }};
  EXPECT_THAT(
      error_text<ConfigError>([&] { build_on_meta(layer); }),
      HasAll("layer \"table\" cannot be built without memory", "by pointer"));
  EXPECT_TRUE(torch::ones({2}).is_cpu());
}

using testing::ElementsAre;

std::vector<LayerCost>
count(const LayerList& layers, std::vector<int64_t> shape) {
  return count_layers(layers, {{std::move(shape)}});
}

TEST(LayerCost, LinearAndReluByHand) {
  LayerList layers;
  layers.add("a", [] { return torch::nn::Linear(10, 20); });
  layers.add("b", [] { return torch::nn::ReLU(); });
  layers.add("c", [] { return torch::nn::Linear(20, 5); });
  const auto costs = count(layers, {4, 10});
  ASSERT_EQ(costs.size(), 3u);
  EXPECT_EQ(costs[0].name, "a");
  EXPECT_EQ(costs[0].parameters, 10 * 20 + 20);
  EXPECT_EQ(costs[0].parameter_bytes, 4 * (10 * 20 + 20));
  EXPECT_EQ(costs[0].forward_flops, 2 * 4 * 10 * 20);
  // The batch needs no gradient, so only the weights' gradient is computed.
  EXPECT_EQ(costs[0].backward_flops, 2 * 4 * 10 * 20);
  EXPECT_EQ(costs[0].activation_bytes, 4 * 4 * 10);  // its input
  EXPECT_EQ(costs[0].output_bytes, 4 * 4 * 20);
  EXPECT_EQ(costs[1].forward_flops, 0);
  EXPECT_EQ(costs[1].activation_bytes, 4 * 4 * 20);  // its output
  EXPECT_EQ(costs[1].repeated_bytes, 0);
  EXPECT_EQ(costs[2].forward_flops, 2 * 4 * 20 * 5);
  EXPECT_EQ(costs[2].backward_flops, 2 * 2 * 4 * 20 * 5);
  // The layer before has the same tensor and counts it.
  EXPECT_EQ(costs[2].activation_bytes, 0);
  EXPECT_EQ(costs[2].repeated_bytes, 4 * 4 * 20);
  EXPECT_EQ(activation_bytes(costs, 0, 3), 4 * 4 * (10 + 20));
  EXPECT_EQ(activation_bytes(costs, 2, 3), 4 * 4 * 20);
  EXPECT_THAT(costs[2].outputs, ElementsAre(TensorSpec{{4, 5}}));
  EXPECT_EQ(flops_of(costs)[2], 3 * 2 * 4 * 20 * 5);
}

TEST(LayerCost, ConvolutionAndNormByHand) {
  LayerList layers;
  layers.add("conv", [] {
    return torch::nn::Conv2d(
        torch::nn::Conv2dOptions(4, 8, 3).stride(2).padding(1).groups(2));
  });
  layers.add("norm", [] { return torch::nn::BatchNorm2d(8); });
  layers.add("up", [] {
    return torch::nn::ConvTranspose2d(
        torch::nn::ConvTranspose2dOptions(8, 6, 2).stride(2));
  });
  const auto costs = count(layers, {3, 4, 10, 10});
  const double conv = 2.0 * 3 * 8 * 5 * 5 * 2 * 9;
  EXPECT_EQ(costs[0].forward_flops, conv);
  EXPECT_EQ(costs[0].backward_flops, conv);
  EXPECT_EQ(costs[0].activation_bytes, 4 * 3 * 4 * 10 * 10);
  EXPECT_THAT(costs[0].outputs, ElementsAre(TensorSpec{{3, 8, 5, 5}}));
  // Its input, and the mean and inverse deviation of 8 channels.
  EXPECT_EQ(costs[1].activation_bytes, 4 * (3 * 8 * 5 * 5 + 2 * 8));
  EXPECT_EQ(costs[1].buffer_bytes, 2 * 4 * 8 + 8);
  const double up = 2.0 * 3 * 8 * 5 * 5 * 6 * 4;
  EXPECT_EQ(costs[2].forward_flops, up);
  EXPECT_EQ(costs[2].backward_flops, 2 * up);
  EXPECT_THAT(costs[2].outputs, ElementsAre(TensorSpec{{3, 6, 10, 10}}));
}

TEST(LayerCost, SkipsInPlaceOperatorsAndSeveralInputs) {
  LayerList layers;
  layers.add("a", [] { return torch::nn::Linear(8, 8); });
  layers.add_function("split", [](const torch::Tensor& x) {
    return std::make_tuple(torch::relu_(const_cast<torch::Tensor&>(x)), x);
  });
  layers.add_function(
      "add", [](const torch::Tensor& x, const torch::Tensor& skip) {
        return std::make_tuple((x + 1).add_(skip), skip.mean());
      });
  const auto costs = count(layers, {2, 8});
  EXPECT_EQ(costs[1].outputs.size(), 2u);
  EXPECT_EQ(costs[1].output_bytes, 2 * 4 * 2 * 8);
  EXPECT_EQ(costs[2].outputs[1], (TensorSpec{{}}));
  // The batch; the ReLU's output, which is two outputs and the sum's input.
  EXPECT_EQ(activation_bytes(costs, 0, 3), 2 * 4 * 2 * 8);
}

TEST(LayerCost, ATensorThatTwoLayersKeepCountsOnce) {
  LayerList layers;
  layers.add("a", [] { return torch::nn::Linear(8, 8); });
  for (const char* name : {"b", "c"}) {
    layers.add_function(name, [](const Tensors& given) {
      const auto x = given.back();
      return Tensors{x.square(), x};  // keeps x
    });
  }
  const auto costs = count(layers, {2, 8});
  EXPECT_EQ(costs[1].activation_bytes, 4 * 2 * 8);
  EXPECT_EQ(costs[2].activation_bytes, 0);
  EXPECT_EQ(costs[2].repeated_bytes, 4 * 2 * 8);
}

TEST(LayerCost, AttentionKeepsNoMatrixOfScores) {
  LayerList layers;
  layers.add_function("attention", [](const torch::Tensor& x) {
    auto parts = x.requires_grad_().chunk(3, 3);
    return at::scaled_dot_product_attention(
        parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
  });
  const auto costs = count(layers, {2, 3, 64, 3 * 16});
  const double product = 2.0 * 2 * 3 * 64 * 64 * 16;
  EXPECT_EQ(costs[0].forward_flops, 2 * product);
  EXPECT_EQ(costs[0].backward_flops, 5 * product);
  // The input, the output, and a sum for each row.
  EXPECT_EQ(costs[0].activation_bytes, 4 * 2 * 3 * 64 * (3 * 16 + 16 + 1));
}

TEST(LayerCost, KnowsCommonLayers) {
  using namespace torch::nn;
  const std::vector<int64_t> image{2, 8, 16, 16};
  const std::vector<int64_t> sequence{2, 6, 8};
  const auto check = [](const std::string& name, std::vector<int64_t> shape,
                        auto build) {
    LayerList layers;
    layers.add("in", [] { return PReLU(); });  // so that gradients go through
    layers.add(name, build);
    try {
      const auto costs = count(layers, std::move(shape));
      EXPECT_GT(costs[1].output_bytes, 0) << name;
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
  };
  check("conv1d", {2, 8, 9}, [] { return Conv1d(Conv1dOptions(8, 4, 3)); });
  check(
      "conv3d", {2, 8, 5, 5, 5}, [] { return Conv3d(Conv3dOptions(8, 4, 3)); });
  check("max_pool", image, [] { return MaxPool2d(MaxPool2dOptions(2)); });
  check("avg_pool", image, [] { return AvgPool2d(AvgPool2dOptions(2)); });
  check("adaptive_avg", image, [] {
    return AdaptiveAvgPool2d(AdaptiveAvgPool2dOptions({3, 3}));
  });
  check("adaptive_max", image, [] {
    return AdaptiveMaxPool2d(AdaptiveMaxPool2dOptions({3, 3}));
  });
  check(
      "layer_norm", sequence, [] { return LayerNorm(LayerNormOptions({8})); });
  check("group_norm", image, [] { return GroupNorm(GroupNormOptions(4, 8)); });
  check("instance_norm", image, [] {
    return InstanceNorm2d(InstanceNorm2dOptions(8).affine(true));
  });
  check("batch_norm1d", {4, 8}, [] { return BatchNorm1d(8); });
  check("dropout", sequence, [] { return Dropout(0.1); });
  check("dropout2d", image, [] { return Dropout2d(0.1); });
  check("gelu", sequence, [] { return GELU(); });
  check("silu", sequence, [] { return SiLU(); });
  check("elu", sequence, [] { return ELU(); });
  check("mish", sequence, [] { return Mish(); });
  check("leaky", sequence, [] { return LeakyReLU(); });
  check("relu6", sequence, [] { return ReLU6(); });
  check("softplus", sequence, [] { return Softplus(); });
  check("tanh", sequence, [] { return Tanh(); });
  check("glu", sequence, [] { return GLU(); });
  check("softmax", sequence, [] { return Softmax(-1); });
  check("log_softmax", sequence, [] { return LogSoftmax(-1); });
  check("upsample", image, [] {
    return Upsample(UpsampleOptions().scale_factor(std::vector<double>{2, 2}));
  });
  check("bilinear", image, [] {
    return Upsample(UpsampleOptions()
                        .scale_factor(std::vector<double>{2, 2})
                        .mode(torch::kBilinear)
                        .align_corners(false));
  });
  check("pixels", image, [] { return PixelShuffle(2); });
  check("reflect", image, [] { return ReflectionPad2d(2); });
  check("unfold", image, [] { return Unfold(UnfoldOptions(2)); });
  check("flatten", image, [] { return Flatten(); });
  check("encoder", sequence, [] {
    return TransformerEncoderLayer(TransformerEncoderLayerOptions(8, 2));
  });
  LayerList functions;
  functions.add_function("lstm", [](const torch::Tensor& x) {
    LSTM lstm(8, 5);
    return std::get<0>(lstm(x));
  });
  functions.add_function("norm", [](const torch::Tensor& x) {
    return at::rms_norm(x, {5}, torch::ones({5}).requires_grad_());
  });
  functions.add_function("index", [](const torch::Tensor& x) {
    return at::where(x > 0, x, x.flip(0)).index_select(1, torch::arange(1));
  });
  const auto costs = count(functions, {2, 6, 8});
  EXPECT_GT(costs[0].forward_flops, 2 * 12 * 8 * 20);
}

TEST(LayerCost, NeedsNoMemory) {
  LayerList layers;
  for (int i = 0; i < 10; ++i) {  // 40 GiB of parameters
    layers.add("block." + std::to_string(i), [] {
      return torch::nn::Linear(
          torch::nn::LinearOptions(1 << 15, 1 << 15).bias(false));
    });
  }
  const auto costs = count(layers, {1 << 20, 1 << 15});
  int64_t bytes = 0;
  for (const auto& cost : costs) bytes += cost.parameter_bytes;
  EXPECT_EQ(bytes, int64_t{40} << 30);
}

TEST(LayerCost, LeavesExistingTensorsUnchanged) {
  auto shared = torch::nn::Linear(6, 6);
  shared->weight.mutable_grad() = torch::full({6, 6}, 3.0);
  LayerList layers;
  layers.add("first", [=] { return shared; });
  layers.add_function(
      "table",
      [table = torch::ones({6})](const torch::Tensor& x) { return x * table; });
  layers.add("second", [=] { return shared; });
  const auto costs = count(layers, {4, 6});
  EXPECT_EQ(costs[0].parameters, 42);
  EXPECT_EQ(costs[2].backward_flops, 2 * 2 * 4 * 6 * 6);
  EXPECT_EQ(costs[2].activation_bytes, 4 * 4 * 6);
  EXPECT_TRUE(shared->weight.is_cpu());
  EXPECT_TRUE(shared->weight.grad().equal(torch::full({6, 6}, 3.0)));
  shared->zero_grad();
  shared(torch::ones({2, 6})).sum().backward();
  EXPECT_TRUE(shared->weight.grad().equal(torch::full({6, 6}, 2.0)));
}

TEST(LayerCost, DisturbsNoOtherThread) {
  LayerList layers;
  for (int i = 0; i < 20; ++i) {
    layers.add(
        "a" + std::to_string(i), [] { return torch::nn::Linear(16, 16); });
  }
  std::atomic<bool> stop{false};
  std::thread other([&] {
    while (!stop) {
      auto x = torch::ones({2, 2}).requires_grad_();
      x.mm(x).sum().backward();
      ASSERT_TRUE(x.grad().equal(torch::full({2, 2}, 4.0)));
    }
  });
  torch::manual_seed(1);
  const auto before = torch::rand({3});
  torch::manual_seed(1);
  std::vector<std::vector<LayerCost>> counts(2);
  std::vector<std::thread> threads;
  for (auto& result : counts) {
    threads.emplace_back([&] {
      const torch::NoGradGuard off;
      result = count(layers, {4, 16});
    });
  }
  for (auto& thread : threads) thread.join();
  stop = true;
  other.join();
  for (const auto& costs : counts) {
    for (const auto& cost : costs) {
      EXPECT_EQ(cost.forward_flops, 2 * 4 * 16 * 16) << cost.name;
    }
  }
  EXPECT_TRUE(torch::rand({3}).equal(before));
}

std::string refused(const LayerList& layers, std::vector<int64_t> shape) {
  return error_text<ConfigError>([&] { count(layers, std::move(shape)); });
}

TEST(LayerCost, NamesTheLayerThatDoesNotFit) {
  LayerList layers, images;
  layers.add("a", [] { return torch::nn::Linear(10, 20); });
  layers.add("b", [] { return torch::nn::Linear(21, 5); });
  images.add("conv", [] {
    return torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3));
  });
  EXPECT_THAT(
      refused(layers, {4, 10}),
      HasAll(
          "layer \"b\", which is given [4, 20] float32 by layer "
          "\"a\", cannot compute: operator aten::addmm: ",
          "4x20 and 21x5"));
  EXPECT_THAT(
      refused(images, {2, 1, 8, 8}),
      HasAll("given [2, 1, 8, 8] float32 by the batch", "channels"));
}

TEST(LayerCost, NamesTheOperatorThatNeedsData) {
  LayerList some, value;
  some.add_function("some", [](const torch::Tensor& x) { return x.histc(); });
  value.add_function("value", [](const torch::Tensor& x) {
    return x * x.sum().item<double>();
  });
  EXPECT_THAT(
      refused(some, {5, 2, 4}), HasAll(
                                    "layer \"some\"",
                                    "operator aten::histc has no "
                                    "kernel",
                                    "register one"));
  EXPECT_THAT(
      refused(value, {5}),
      HasAll("layer \"value\"", "aten::_local_scalar_dense"));
}

// A linear layer, its activation and the linear layer after it.
LayerList mlp() {
  LayerList layers;
  layers.add("a", [] { return torch::nn::Linear(10, 20); });
  layers.add("b", [] { return torch::nn::GELU(); });
  layers.add("c", [] {
    return torch::nn::Linear(torch::nn::LinearOptions(20, 5).bias(false));
  });
  return layers;
}

TEST(LayerCost, PeaksByHand) {
  const auto costs = count(mlp(), {4, 10});
  const int64_t wide = 4 * 4 * 20;
  EXPECT_EQ(costs[0].forward_peak_bytes, wide);  // its output
  EXPECT_EQ(costs[1].forward_peak_bytes, wide);
  EXPECT_EQ(costs[2].forward_peak_bytes, 4 * 4 * 5);
  // The output's gradient, and those of weight and bias.
  EXPECT_EQ(costs[0].backward_peak_bytes, wide + 4 * 20 * 10 + 4 * 20);
  EXPECT_EQ(costs[0].backward_peak_gradient_bytes, 4 * 20 * 10 + 4 * 20);
  EXPECT_EQ(costs[0].backward_working_bytes, wide);
  // Gradients of output and input.
  EXPECT_EQ(costs[1].backward_peak_bytes, 2 * wide);
  EXPECT_EQ(costs[1].backward_working_bytes, 2 * wide);
  EXPECT_EQ(costs[1].backward_peak_gradient_bytes, 0);
  EXPECT_EQ(costs[2].backward_peak_bytes, 4 * 4 * 5 + wide + 4 * 5 * 20);
  EXPECT_EQ(costs[2].backward_working_bytes, 4 * 4 * 5 + wide);
  EXPECT_EQ(costs[0].input_bytes, 4 * 4 * 10);
  EXPECT_EQ(costs[1].input_bytes, wide);
  EXPECT_EQ(costs[2].input_bytes, wide);
  EXPECT_EQ(costs[2].kept_input_bytes, wide);
}

TEST(LayerCost, FreedTensorsLowerTheBackwardPeak) {
  LayerList all = mlp();  // so that gradients flow on
  all.add("two", [] {
    return torch::nn::Sequential(torch::nn::Sigmoid(), torch::nn::Sigmoid());
  });
  const auto cost = count(all, {4, 10}).back();
  const int64_t bytes = 4 * 4 * 5;
  EXPECT_EQ(cost.activation_bytes, 2 * bytes);
  EXPECT_EQ(cost.forward_peak_bytes, 2 * bytes);
  // One more gradient lives, while kept tensors are freed one by one.
  EXPECT_EQ(cost.backward_peak_bytes, 2 * bytes);
}

TEST(LayerCost, ParametersByName) {
  const auto costs = count(mlp(), {4, 10});
  ASSERT_EQ(costs[0].parameter_specs.size(), 2u);
  EXPECT_EQ(costs[0].parameter_specs[0].name, "weight");
  EXPECT_EQ(costs[0].parameter_specs[0].tensor, (TensorSpec{{20, 10}}));
  EXPECT_EQ(costs[0].parameter_specs[1].tensor, (TensorSpec{{20}}));
  EXPECT_TRUE(costs[0].parameter_specs[1].requires_grad);
  EXPECT_TRUE(costs[1].parameter_specs.empty());
}

TEST(LayerCost, ResultsThatSelectiveRecomputeKeeps) {
  const auto costs =
      count_layers(mlp(), {{{4, 10}}}, {.keep = {"aten::addmm", "aten::mm"}});
  EXPECT_EQ(costs[0].kept_result_bytes, 4 * 4 * 20);
  EXPECT_EQ(costs[1].kept_result_bytes, 0);
  EXPECT_EQ(costs[2].kept_result_bytes, 4 * 4 * 5);
}

// Padding calls operators that fill and copy: the bytes are theirs alone.
TEST(LayerCost, BytesOfAnOperatorThatCallsOthersCountOnce) {
  LayerList layers;
  layers.add_function("pad", [](const torch::Tensor& x) {
    return torch::constant_pad_nd(x, {0, 4});
  });
  const auto counted = count_operators(layers, {{{5, 20}}});
  std::map<std::string, double> bytes;
  for (const auto& one : counted.layers[0].forward) {
    bytes[one.name] += one.bytes;
  }
  EXPECT_GT(bytes.at("copy_"), 0);
  EXPECT_EQ(bytes.at("constant_pad_nd"), 0);
}

TEST(LayerCost, InAnotherDtype) {
  const auto whole = count(mlp(), {4, 10});
  const auto half =
      count_layers(mlp(), {{{4, 10}}}, {.dtype = torch::kBFloat16});
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_EQ(2 * half[i].parameter_bytes, whole[i].parameter_bytes);
    EXPECT_EQ(2 * half[i].activation_bytes, whole[i].activation_bytes);
    EXPECT_EQ(2 * half[i].forward_peak_bytes, whole[i].forward_peak_bytes);
    EXPECT_EQ(2 * half[i].backward_peak_bytes, whole[i].backward_peak_bytes);
    EXPECT_EQ(half[i].forward_flops, whole[i].forward_flops);
  }
}

TEST(LayerCost, InputsThatArePassedOnCountOnce) {
  LayerList layers;
  const auto pass = [](torch::nn::LinearImpl& linear, const Tensors& inputs) {
    return Tensors{linear.forward(inputs[0]), inputs[1]};
  };
  layers.add(
      "a", [] { return torch::nn::Linear(10, 10); }, pass);
  layers.add(
      "b", [] { return torch::nn::Linear(10, 10); }, pass);
  const auto costs = count_layers(layers, {{{4, 10}}, {{4, 7}}});
  EXPECT_EQ(costs[0].input_bytes, 4 * 4 * (10 + 7));
  EXPECT_EQ(costs[1].input_bytes, 4 * 4 * 10);
}

// Results have the same memory order as on a CPU: later operators are counted
// by that order.
TEST(MetaKernels, KeepTheMemoryOrderOfCpus) {
  using Tensors = std::vector<torch::Tensor>;
  using Call = std::function<Tensors(const torch::Tensor&)>;
  const auto convolved = [](const torch::Tensor& x, torch::MemoryFormat order) {
    const auto w =
        torch::ones({4, x.size(1), 3, 3}, x.options()).contiguous(order);
    const auto y = at::convolution(
        x, w, std::nullopt, {1, 1}, {1, 1}, {1, 1}, false, {0, 0}, 1);
    const auto [gx, gw, gb] = at::convolution_backward(
        at::empty_like(y), x, w, std::nullopt, {1, 1}, {1, 1}, {1, 1}, false,
        {0, 0}, 1, {true, true, true});
    return Tensors{y, gx, gw, gb};
  };
  const std::vector<std::pair<std::string, Call>> calls = {
      {"convolution",
       [&](const auto& x) {
         return convolved(x, torch::MemoryFormat::Contiguous);
       }},
      {"convolution, weights channels last",
       [&](const auto& x) {
         return convolved(x, torch::MemoryFormat::ChannelsLast);
       }},
      {"batch norm",
       [](const auto& x) {
         const auto w = torch::ones({x.size(1)}, x.options());
         const auto [y, mean, scale] =
             at::native_batch_norm(x, w, w, w, w, true, 0.1, 1e-5);
         const auto [gx, gw, gb] = at::native_batch_norm_backward(
             x, x, w, w, w, mean, scale, true, 1e-5, {true, true, true});
         return Tensors{y, gx};
       }},
      {"pools",
       [](const auto& x) {
         const auto y = at::_adaptive_avg_pool2d(x, {2, 2});
         return Tensors{
             y, at::_adaptive_avg_pool2d_backward(y, x),
             std::get<0>(at::max_pool2d_with_indices(x, {2, 2}))};
       }},
      {"element by element", [](const auto& x) {
         return Tensors{
             at::relu(x), at::hardtanh(x, -1, 1), at::where(x > 0, x, x),
             x.flip({0}), at::reflection_pad2d(x, {1, 1, 1, 1})};
       }}};
  for (const int64_t channels : {1, 3}) {
    for (const auto order :
         {torch::MemoryFormat::Contiguous, torch::MemoryFormat::ChannelsLast}) {
      const auto x = torch::rand({2, channels, 8, 8}).contiguous(order);
      for (const auto& [name, call] : calls) {
        const auto real = call(x), meta = call(x.to(torch::kMeta));
        for (size_t i = 0; i < real.size(); ++i) {
          EXPECT_EQ(meta[i].sizes(), real[i].sizes()) << name << " " << i;
          EXPECT_EQ(
              meta[i].suggest_memory_format(), real[i].suggest_memory_format())
              << name << " " << i << ", " << channels << " channels, " << order;
        }
      }
    }
  }
}

// Whether queries, keys and values lie in one tensor or not.
TEST(MetaKernels, AttentionKeepsHeadsBeforeWidths) {
  const auto strides = [](const torch::Tensor& all) {
    const auto q = all.select(2, 0).transpose(1, 2);
    const auto k = all.select(2, 1).transpose(1, 2).contiguous();
    const auto v = all.select(2, 2).transpose(1, 2);
    const auto [y, sums] =
        at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, true);
    const auto [gq, gk, gv] =
        at::_scaled_dot_product_flash_attention_for_cpu_backward(
            y, q, k, v, y, sums, 0.0, true);
    std::vector<std::vector<int64_t>> all_strides;
    for (const auto& one : {y, gq, gk, gv}) {
      all_strides.push_back(one.strides().vec());
    }
    return all_strides;
  };
  const auto all = torch::rand({2, 16, 3, 4, 8});
  EXPECT_EQ(strides(all.to(torch::kMeta)), strides(all));
}

}  // namespace echelon::counting::layer_cost_test
