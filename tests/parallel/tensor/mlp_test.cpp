#include "echelon/parallel/tensor/mlp.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "tests/parallel/tensor/parts.h"

namespace echelon::mlp_test {

using torch::Tensor;

constexpr uint64_t kSeed = 5;

// GELU by tanh, as its definition says.
Tensor tanh_gelu(const Tensor& x) {
  return 0.5 * x *
         (1 + at::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

Tensor
by_formula(const GeluMlp&, const Tensor& x, const parity::NamedTensors& p) {
  const auto inner = x.matmul(p.at("c_fc.weight")) + p.at("c_fc.bias");
  return tanh_gelu(inner).matmul(p.at("c_proj.weight")) + p.at("c_proj.bias");
}

Tensor
by_formula(const GatedMlp&, const Tensor& x, const parity::NamedTensors& p) {
  const auto linear = [&](const Tensor& from, const std::string& name) {
    const auto bias = p.find(name + ".bias");
    return at::linear(
        from, p.at(name + ".weight"),
        bias != p.end() ? bias->second : Tensor());
  };
  const auto gate = linear(x, "gate_proj");
  return linear(gate * at::sigmoid(gate) * linear(x, "up_proj"), "down_proj");
}

class MlpParity : public testing::TestWithParam<parity::Way> {};
INSTANTIATE_TEST_SUITE_P(
    Ways, MlpParity, testing::ValuesIn(parity::ways()),
    testing::PrintToStringParamName());

template <class Mlp>
void expect_formula(
    const MlpShape& shape, const TensorParallel& parallel,
    bool joined = false) {
  Mlp layer(shape, parallel, "mlp");
  const auto whole = parity::give_parts(layer, kSeed);
  if (joined) parity::join_parameters(layer);
  parity::expect_layer(
      layer, parallel, whole,
      {.x = parity::random({3, 5, shape.hidden}, 1),
       .cotangent = parity::random({3, 5, shape.hidden}, 2)},
      [&](const Tensor& x) { return by_formula(layer, x, whole); },
      [&](const Tensor& x) { return layer.forward(x, 3 * 5); });
  if constexpr (std::is_same_v<Mlp, GatedMlp>) {
    EXPECT_EQ(
        parity::were_joined(layer, "gate_proj.weight", "up_proj.weight"),
        joined);
  }
}

TEST_P(MlpParity, Gelu) {
  for (const int64_t intermediate : {12, 7, 2}) {
    parity::on_ranks(GetParam(), [&](const TensorParallel& parallel) {
      expect_formula<GeluMlp>({6, intermediate, true}, parallel);
    });
  }
}

TEST_P(MlpParity, Gated) {
  for (const int64_t intermediate : {12, 7, 2}) {
    parity::on_ranks(GetParam(), [&](const TensorParallel& parallel) {
      for (const bool joined : {false, true}) {
        for (const bool bias : {false, true}) {
          expect_formula<GatedMlp>({6, intermediate, bias}, parallel, joined);
        }
      }
    });
  }
}

// More than one piece, pieces that are not full, and tensors that have none.
TEST(SiluTimes, MatchesItsFormulaAtEverySize) {
  for (const int64_t size : {0, 1, 1000, 16384, 200001}) {
    const auto gate = parity::random({size}, 1).requires_grad_();
    const auto up = parity::random({size}, 2).requires_grad_();
    const auto weights = parity::random({size}, 3);
    const auto y = silu_times(gate, up);
    const auto actual =
        torch::autograd::grad({(y * weights).sum()}, {gate, up});
    const auto formula = gate * at::sigmoid(gate) * up;
    const auto expected =
        torch::autograd::grad({(formula * weights).sum()}, {gate, up});
    EXPECT_TRUE(torch::allclose(y, formula, 1e-12, 1e-13)) << size;
    EXPECT_TRUE(torch::allclose(actual[0], expected[0], 1e-12, 1e-13)) << size;
    EXPECT_TRUE(torch::allclose(actual[1], expected[1], 1e-12, 1e-13)) << size;
  }
}

TEST(SiluTimes, TensorsThatAreNotContiguous) {
  const auto both = parity::random({4, 6}, 1);
  const auto gate = both.narrow(1, 0, 3).detach().requires_grad_();
  const auto up = both.narrow(1, 3, 3).detach().requires_grad_();
  const auto y = silu_times(gate, up);
  y.sum().backward();
  EXPECT_TRUE(torch::allclose(y, at::silu(gate) * up));
  EXPECT_TRUE(torch::allclose(up.grad(), at::silu(gate)));
}

TEST(SiluTimes, CanBeDifferentiatedTwice) {
  const auto gate = parity::random({5}, 1).requires_grad_();
  const auto up = parity::random({5}, 2).requires_grad_();
  const auto twice = [&](const Tensor& y) {
    const auto first = torch::autograd::grad(
        {y.sum()}, {gate}, {}, std::nullopt, /*create_graph=*/true)[0];
    return torch::autograd::grad({(first * first).sum()}, {gate, up});
  };
  const auto actual = twice(silu_times(gate, up));
  const auto expected = twice(gate * at::sigmoid(gate) * up);
  EXPECT_TRUE(torch::allclose(actual[0], expected[0]));
  EXPECT_TRUE(torch::allclose(actual[1], expected[1]));
}

// The product has added the bias: its gradient is the sum of the product's.
TEST(GeluWithBias, GivesTheBiasItsGradient) {
  for (const int64_t width : {0, 1, 5}) {
    const auto bias = parity::random({width}, 1).requires_grad_();
    const auto x = parity::random({2, 3, width}, 2).requires_grad_();
    const auto weights = parity::random({2, 3, width}, 3);
    const auto twice = [&](const Tensor& y) {
      const auto first = torch::autograd::grad(
          {(y * weights).sum()}, {x, bias}, {}, std::nullopt,
          /*create_graph=*/true);
      const auto second = torch::autograd::grad(
          {first[0].square().sum() + first[1].square().sum()}, {x, bias});
      return std::vector<Tensor>{first[0], first[1], second[0], second[1]};
    };
    const auto actual = twice(gelu_with_bias(x + bias.detach(), bias));
    const auto expected = twice(tanh_gelu(x + bias));
    EXPECT_TRUE(torch::allclose(actual[0], expected[0])) << width;
    EXPECT_TRUE(torch::allclose(actual[1], expected[1])) << width;
    EXPECT_TRUE(torch::allclose(actual[2], expected[2])) << width;
    EXPECT_TRUE(torch::allclose(actual[3], expected[3])) << width;
    const auto alone = torch::autograd::grad(
        {(gelu_with_bias(x + bias.detach(), bias) * weights).sum()}, {x, bias});
    EXPECT_TRUE(torch::allclose(alone[0], expected[0])) << width;
    EXPECT_TRUE(torch::allclose(alone[1], expected[1])) << width;
  }
}

// Pipelines keep what a node that leads to a parameter needs until their second
// half of backward: GELU's may not, since it needs more than the product's.
TEST(GeluWithBias, TheNodeOfGeluLeadsToNoParameter) {
  const auto bias = parity::random({5}, 1).requires_grad_();
  const auto x = parity::random({3, 5}, 2).requires_grad_();
  const auto y = gelu_with_bias(x * 2, bias);
  const auto& edges = y.grad_fn()->next_edges();
  ASSERT_EQ(edges.size(), 2);
  EXPECT_EQ(edges[0].function, edges[1].function);
  EXPECT_NE(edges[0].function->name(), "torch::autograd::AccumulateGrad");
}

}  // namespace echelon::mlp_test
