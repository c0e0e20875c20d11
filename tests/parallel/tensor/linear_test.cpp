// Sharded linear layers against at::linear of the whole matrices.
#include "echelon/parallel/tensor/linear.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/parallel/tensor/parts.h"

namespace echelon::linear_test {

using parity::on_ranks;
using parity::random;
using torch::Tensor;

constexpr int64_t kBatch = 2;
constexpr int64_t kSequence = 5;  // 10 tokens: uneven over 3 and 4 ranks
constexpr int64_t kTokens = kBatch * kSequence;

// The sizes are uneven over 2, 3 and 4 ranks.
LinearShape shape(bool bias, WeightLayout layout) {
  return {.in = 7, .out = 11, .bias = bias, .layout = layout};
}

Tensor whole_product(
    const Tensor& x, const parity::NamedTensors& whole, WeightLayout layout) {
  const auto weight = whole.at("weight");
  const auto bias = whole.find("bias");
  return at::linear(
      x, layout == WeightLayout::out_in ? weight : weight.t(),
      bias == whole.end() ? Tensor() : bias->second);
}

class LinearParity : public testing::TestWithParam<
                         std::tuple<parity::Way, bool, WeightLayout>> {
 protected:
  parity::Way way() const { return std::get<0>(GetParam()); }
  bool bias() const { return std::get<1>(GetParam()); }
  WeightLayout layout() const { return std::get<2>(GetParam()); }
  LinearShape linear_shape() const { return shape(bias(), layout()); }
};

// Compares `layer` with the product of its whole matrix.
template <class Layer, class Forward>
void expect_product(
    Layer& layer, const TensorParallel& tp, WeightLayout layout, uint64_t seed,
    const Forward& forward,
    std::function<Tensor(const Tensor&)> part_of_x = nullptr,
    std::function<Tensor(const Tensor&)> part_of_y = nullptr) {
  const auto parameters = parity::give_parts(layer, seed);
  parity::expect_layer(
      layer, tp, parameters,
      {.x = random({kBatch, kSequence, 7}, 11),
       .cotangent = random({kBatch, kSequence, 11}, 11 + seed),
       .part_of_x = std::move(part_of_x),
       .part_of_y = std::move(part_of_y)},
      [&](const Tensor& x) { return whole_product(x, parameters, layout); },
      forward);
}

// All features of all tokens, or this rank's features of them.
auto all_features(const TensorParallel& tp) {
  return [&tp](const Tensor& whole) {
    return tp.splits_tokens() ? whole.flatten(0, 1) : whole;
  };
}

auto own_features(const TensorParallel& tp) {
  return [&tp](const Tensor& whole) {
    const auto mine = tp.part_of(whole.size(-1));
    return all_features(tp)(whole.narrow(-1, mine.begin, mine.size()));
  };
}

TEST_P(LinearParity, ColumnKeepsItsOutput) {
  on_ranks(way(), [&](const TensorParallel& tp) {
    ColumnParallelLinear layer(linear_shape(), tp, "layer");
    expect_product(
        layer, tp, layout(), 1,
        [&](const Tensor& x) { return layer.forward(x, kTokens); }, nullptr,
        own_features(tp));
  });
}

TEST_P(LinearParity, ColumnGathersItsOutput) {
  on_ranks(way(), [&](const TensorParallel& tp) {
    ColumnParallelLinear layer(linear_shape(), tp, "layer", true);
    expect_product(
        layer, tp, layout(), 2,
        [&](const Tensor& x) { return layer.forward(x, kTokens); }, nullptr,
        all_features(tp));
  });
}

TEST_P(LinearParity, RowTakesItsInput) {
  on_ranks(way(), [&](const TensorParallel& tp) {
    RowParallelLinear layer(linear_shape(), tp, "layer");
    expect_product(
        layer, tp, layout(), 3,
        [&](const Tensor& x) { return layer.forward(x); }, own_features(tp));
  });
}

TEST_P(LinearParity, RowScattersItsInput) {
  on_ranks(way(), [&](const TensorParallel& tp) {
    RowParallelLinear layer(linear_shape(), tp, "layer", true);
    expect_product(
        layer, tp, layout(), 4,
        [&](const Tensor& x) { return layer.forward(x); }, all_features(tp));
  });
}

// Outputs 0 and 1 on every rank, the others on rank 0 alone.
TEST_P(LinearParity, OutputsOfSeveralRanks) {
  on_ranks(way(), [&](const TensorParallel& tp) {
    Shard outputs{.pieces = {{0, 2}}};
    if (tp.rank() == 0) outputs.pieces = outputs.owned = {{2, 11}, {0, 2}};
    ColumnParallelLinear layer(
        linear_shape(), tp, "layer", outputs, /*shared=*/tp.size() > 1);
    const auto parameters = parity::give_parts(layer, 5);
    // Each rank's loss has a part of its own of the shared outputs' gradient.
    const auto part = [&](const Tensor& whole) {
      const auto rows = all_features(tp)(whole);
      const auto shared = rows.narrow(-1, 0, 2) / tp.size();
      if (tp.rank() > 0) return shared;
      return torch::cat({rows.narrow(-1, 2, 9), shared}, -1);
    };
    const auto cotangent = random({kBatch, kSequence, 11}, 16);
    auto whole = random({kBatch, kSequence, 7}, 11).requires_grad_();
    whole_product(whole, parameters, layout()).backward(cotangent);
    auto x = parity::part_of_tokens(whole, tp).detach().requires_grad_();
    layer.forward(x, kTokens).backward(part(cotangent));
    SharedGradients(layer, tp).finish();
    parity::expect_parts(layer, parameters);
    parity::expect_tensor(
        "gradient of x", parity::part_of_tokens(whole.grad(), tp), x.grad());
  });
}

// Rows of one matrix, with biases of one vector, or of matrices of their own.
std::vector<LinearWeights> two_weights(bool adjacent, bool bias) {
  const auto weight = random({5, 7}, 1), vector = random({5}, 2);
  const auto leaf = [&](const Tensor& part) {
    const auto own = adjacent ? part.detach() : part.detach().clone();
    return own.set_requires_grad(true);
  };
  std::vector<LinearWeights> all;
  for (const auto& [begin, size] : {std::pair{0, 2}, std::pair{2, 3}}) {
    all.push_back(
        {leaf(weight.narrow(0, begin, size)),
         bias ? leaf(vector.narrow(0, begin, size)) : Tensor()});
  }
  return all;
}

TEST(JoinedWeights, AreOneMatrixAndShareItsGradient) {
  auto weights = two_weights(/*adjacent=*/true, /*bias=*/true);
  const auto one = joined(weights);
  ASSERT_TRUE(one.has_value());
  EXPECT_EQ(one->weight.data_ptr(), weights[0].weight.data_ptr());
  const auto x = random({4, 7}, 3);
  const auto y = at::linear(x, one->weight, one->bias);
  y.backward(random({4, 5}, 4));
  EXPECT_TRUE(weights[0].weight.grad().is_alias_of(weights[1].weight.grad()));
  const auto apart = two_weights(/*adjacent=*/false, /*bias=*/true);
  EXPECT_FALSE(joined(apart).has_value());
  const auto each = column_linear(x, apart, WeightLayout::out_in, {}, 4, "");
  const auto expected = torch::cat(each, 1);
  expected.backward(random({4, 5}, 4));
  EXPECT_TRUE(torch::allclose(y, expected, 1e-14, 1e-14));
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(torch::allclose(
        weights[i].weight.grad(), apart[i].weight.grad(), 1e-14, 1e-14));
    EXPECT_TRUE(weights[i].bias.grad().equal(apart[i].bias.grad()));
  }
}

TEST(JoinedWeights, AreRefusedWhereTheyAreNotAlike) {
  const auto refused = [](const auto& change) {
    auto weights = two_weights(true, true);
    change(weights);
    return !joined(weights).has_value();
  };
  EXPECT_FALSE(refused([](auto&) {}));
  EXPECT_TRUE(refused([](auto& all) { std::swap(all[0], all[1]); }));
  EXPECT_TRUE(refused([](auto& all) { all[1].bias = Tensor(); }));
  EXPECT_TRUE(refused([](auto& all) { all[0].bias = all[0].bias.clone(); }));
  EXPECT_TRUE(
      refused([](auto& all) { all[1].weight.set_requires_grad(false); }));
  EXPECT_TRUE(refused([](auto& all) { all[1].weight = all[1].weight.t(); }));
  EXPECT_TRUE(refused(
      [](auto& all) { all[0].weight = all[0].weight.narrow(0, 0, 1); }));
}

// Autograd tells of a weight that changed between forward and backward.
TEST(JoinedWeights, AChangeInPlaceIsNoticed) {
  auto weights = two_weights(true, false);
  const auto x = random({4, 7}, 3).requires_grad_();
  const auto y = at::linear(x, joined(weights)->weight);
  {
    const torch::NoGradGuard no_grad;
    weights[0].weight.add_(1);
  }
  EXPECT_THROW(y.sum().backward(), std::exception);
}

TEST(SplitFeatures, GradientsSideBySideAreNotCopied) {
  const auto x = random({2, 3, 5}, 1).requires_grad_();
  const auto parts = split_features(x, {2, 3});
  EXPECT_EQ(parts[1].data_ptr(), x.narrow(2, 2, 3).data_ptr());
  const auto gradient = random({2, 3, 5}, 2);
  const auto of = [&](const std::vector<Tensor>& gradients) {
    return torch::autograd::grad(
        parts, {x}, gradients, /*retain_graph=*/true)[0];
  };
  const auto together = of(gradient.split_with_sizes({2, 3}, -1));
  EXPECT_TRUE(together.equal(gradient));
  EXPECT_EQ(together.data_ptr(), gradient.data_ptr());
  const auto apart =
      of({gradient.narrow(2, 0, 2).clone(), gradient.narrow(2, 2, 3).clone()});
  EXPECT_TRUE(apart.equal(gradient));
  EXPECT_NE(apart.data_ptr(), gradient.data_ptr());
}

TEST(SplitFeatures, CanBeDifferentiatedTwice) {
  const auto x = random({4, 5}, 1).requires_grad_();
  const auto twice = [&](const std::vector<Tensor>& parts) {
    const auto y = (parts[0] * parts[0]).sum() * parts[1].sum();
    const auto first = torch::autograd::grad(
        {y}, {x}, {}, std::nullopt, /*create_graph=*/true)[0];
    return torch::autograd::grad({(first * first).sum()}, {x})[0];
  };
  EXPECT_TRUE(torch::allclose(
      twice(split_features(x, {2, 3})), twice(x.split_with_sizes({2, 3}, 1))));
}

std::string
name_of(const testing::TestParamInfo<LinearParity::ParamType>& info) {
  const auto& [way, bias, layout] = info.param;
  return testing::PrintToString(way) + (bias ? "_bias" : "_no_bias") +
         (layout == WeightLayout::out_in ? "_out_in" : "_in_out");
}

INSTANTIATE_TEST_SUITE_P(
    Ways, LinearParity,
    testing::Combine(
        testing::ValuesIn(parity::ways()), testing::Bool(),
        testing::Values(WeightLayout::out_in, WeightLayout::in_out)),
    name_of);

}  // namespace echelon::linear_test
