// The counted costs compared with Python's flop counter and saved-tensor hooks.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <iostream>
#include <map>
#include <sstream>

#include "echelon/counting/layer_cost.h"
#include "echelon/models/make_network.h"
#include "tests/support/python.h"

namespace echelon::counting::layer_cost_pytorch_test {

constexpr int64_t kWidth = 64;
constexpr int64_t kHeads = 4;
constexpr int64_t kVocabulary = 1000;

// cost_reference.py has the same layers.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(bool fused) : fused(fused) {
    const torch::nn::LayerNormOptions options({kWidth});
    norm1 = register_module("norm1", torch::nn::LayerNorm(options));
    norm2 = register_module("norm2", torch::nn::LayerNorm(options));
    qkv = register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth));
    out = register_module("out", torch::nn::Linear(kWidth, kWidth));
    up = register_module("up", torch::nn::Linear(kWidth, 4 * kWidth));
    down = register_module("down", torch::nn::Linear(4 * kWidth, kWidth));
  }

  torch::Tensor attend(
      const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v) {
    if (fused) return at::scaled_dot_product_attention(q, k, v);
    return (q.matmul(k.transpose(2, 3)) * 0.25).softmax(-1).matmul(v);
  }

  torch::Tensor forward(torch::Tensor x) {
    const auto batch = x.size(0);
    const auto length = x.size(1);
    const auto parts = qkv(norm1(x))
                           .view({batch, length, 3, kHeads, kWidth / kHeads})
                           .permute({2, 0, 3, 1, 4})
                           .unbind(0);
    const auto y = attend(parts[0], parts[1], parts[2]).transpose(1, 2);
    x = x + out(y.reshape({batch, length, kWidth}));
    return x + down(torch::gelu(up(norm2(x))));
  }

  bool fused;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

LayerList transformer(bool fused) {
  LayerList layers;
  layers.add(
      "tokens", [] { return torch::nn::Embedding(kVocabulary, kWidth); });
  layers.add("block1", [=] { return Block(fused); });
  layers.add("block2", [=] { return Block(fused); });
  layers.add("norm", [] {
    return torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth}));
  });
  layers.add("head", [] { return torch::nn::Linear(kWidth, kVocabulary); });
  return layers;
}

struct Totals {
  double forward = 0, backward = 0, saved = 0, parameters = 0;
};

std::map<std::string, Totals> python_totals() {
  std::istringstream lines(run_python_script("counting/cost_reference.py", {}));
  std::map<std::string, Totals> all;
  std::string name;
  while (lines >> name) {
    auto& totals = all[name];
    lines >> totals.forward >> totals.backward >> totals.saved >>
        totals.parameters;
  }
  return all;
}

Totals totals_of(const LayerList& layers, const TensorSpec& input) {
  const auto costs = count_layers(layers, {input});
  Totals totals;
  for (const auto& cost : costs) {
    totals.forward += cost.forward_flops;
    totals.backward += cost.backward_flops;
    totals.parameters += static_cast<double>(cost.parameter_bytes);
  }
  totals.saved = static_cast<double>(activation_bytes(costs, 0, costs.size()));
  return totals;
}

TEST(LayerCostPytorch, EqualsThePythonCounters) {
  ECHELON_NEED_PYTHON();
  const auto expected = python_totals();
  const auto resnet = [](const std::string& name) {
    return totals_of(
        model_layers({.name = name}, {3, 224, 224}, 10), {{8, 3, 224, 224}});
  };
  const TensorSpec tokens{{4, 128}, torch::kInt64};
  const std::map<std::string, Totals> ours{
      {"resnet18", resnet("resnet18")},
      {"resnet50", resnet("resnet50")},
      {"plain", totals_of(transformer(false), tokens)},
      {"fused", totals_of(transformer(true), tokens)}};
  ASSERT_EQ(expected.size(), ours.size());
  for (const auto& [name, totals] : ours) {
    const auto& theirs = expected.at(name);
    EXPECT_EQ(totals.forward, theirs.forward) << name;
    EXPECT_EQ(totals.backward, theirs.backward) << name;
    EXPECT_EQ(totals.parameters, theirs.parameters) << name;
    // On GPUs fused attention also keeps the state of the random numbers.
    EXPECT_NEAR(totals.saved, theirs.saved, name == "fused" ? 64 : 0) << name;
    std::cout << name << ": " << totals.forward << " and " << totals.backward
              << " FLOPs, " << totals.saved << " bytes kept\n";
  }
}

}  // namespace echelon::counting::layer_cost_pytorch_test
