// Products in 8 bits: their numbers, and linear layers that multiply so.
#include "echelon/parallel/tensor/fp8.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "echelon/parallel/tensor/linear.h"
#include "tests/parallel/tensor/parts.h"

namespace echelon::fp8_test {

using detail::Factor;
using Of = detail::Factor::Of;
using torch::Tensor;

Tensor random(at::IntArrayRef sizes, uint64_t seed) {
  return parity::random(sizes, seed).to(torch::kBFloat16);
}

// What is left of a number: `bits` of its fraction, in units of the largest.
Tensor rounded(const Tensor& x, double most, int bits, int least_exponent) {
  const auto wide = x.to(torch::kFloat64);
  const double scale = wide.abs().max().item<double>() / most;
  const auto units = wide / scale;
  const auto exponent =
      units.abs().clamp_min(1e-300).log2().floor().clamp_min(least_exponent);
  const auto step = at::exp2(exponent - bits);
  return (units / step).round() * step * scale;
}

Tensor as_e4m3(const Tensor& x) {
  return rounded(x, 448, 3, -6);
}
Tensor as_e5m2(const Tensor& x) {
  return rounded(x, 57344, 2, -14);
}

Factor left_of(const Tensor& x, Of of = Of::forward) {
  return {x, of, true, {.left = true}};
}
Factor right_of(const Tensor& x, Of of = Of::forward) {
  return {x, of, true, {.left = false, .right = true}};
}

double apart(const Tensor& a, const Tensor& b) {
  const auto left = a.to(torch::kFloat64), right = b.to(torch::kFloat64);
  return ((left - right).norm() / right.norm()).item<double>();
}

Tensor product(const Factor& left, const Factor& right) {
  auto y = torch::empty({left.row_count(), right.columns()}, torch::kBFloat16);
  Factor::multiply(y, left, right);
  return y;
}

TEST(Fp8, ProductsOfRoundedNumbers) {
  const auto a = random({16, 32}, 1), b = random({32, 48}, 2);
  const Factor left = left_of(a), right = right_of(b, Of::gradient);
  const auto expected = as_e4m3(a).mm(as_e5m2(b));
  EXPECT_LT(apart(product(left, right), expected), 0.002);  // bf16's rounding
  EXPECT_GT(apart(product(left, right), a.mm(b)), 0.02);
  EXPECT_LT(apart(product(left, right), a.mm(b)), 0.1);
  // However a factor is laid out.
  const auto same = product(left, right);
  EXPECT_TRUE(product(right_of(a), left_of(b, Of::gradient)).equal(same));
  EXPECT_TRUE(product(left, right_of(b.t().contiguous().t(), Of::gradient))
                  .equal(same));
  EXPECT_TRUE(product(right_of(a.t().contiguous()).t(), right).equal(same));
  EXPECT_TRUE(product(left.rows({1, 4}), right).equal(same.slice(0, 1, 4)));
  auto sum = same.clone();
  Factor::multiply_add(sum, left, right);
  EXPECT_TRUE(sum.equal(same + same));
  // A bias.
  const auto bias = random({48}, 3);
  auto y = torch::empty_like(same);
  Factor::multiply(y, left, right, bias);
  EXPECT_TRUE(y.equal(same + bias));
}

// A scale for each matrix: neither small nor large numbers are lost.
TEST(Fp8, NumbersOfAnySize) {
  for (const double size : {1e-20, 1.0, 1e20}) {
    const auto a = random({16, 16}, 1) * size, b = random({16, 16}, 2);
    const auto y = product(left_of(a), right_of(b));
    EXPECT_LT(apart(y / size, (a / size).mm(b)), 0.1) << size;
  }
  const auto zero = torch::zeros({16, 16}, torch::kBFloat16);
  EXPECT_TRUE(product(left_of(zero), right_of(zero)).equal(zero));
  // What is not finite stays so, and the step sees it.
  for (const double wrong : {NAN, INFINITY}) {
    auto a = random({16, 16}, 1);
    a[3][5] = wrong;
    const auto y = product(left_of(a), right_of(a));
    EXPECT_FALSE(y.isfinite().all().item<bool>());
  }
}

// Where a GPU would not take 8 bits, products are those of bf16.
TEST(Fp8, OtherSizesKeepTheirDtype) {
  for (const auto& [k, n] : {std::pair{15, 16}, {16, 15}, {8, 8}}) {
    const auto a = random({4, k}, 1), b = random({k, n}, 2);
    EXPECT_TRUE(product(left_of(a), right_of(b)).equal(a.mm(b)));
  }
  const auto none = torch::empty({0, 16}, torch::kBFloat16);
  EXPECT_EQ(
      product(left_of(none), right_of(random({16, 16}, 1))).sizes(),
      none.sizes());
}

// A column-parallel and a row-parallel layer, as in an MLP, in either layout.
// `tokens` is a multiple of 16 on any rank, so that each product has 8 bits.
void expect_layers(const TensorParallel& plain, WeightLayout layout) {
  constexpr int64_t kTokens = 96, kHidden = 32, kInner = 192;
  const auto x = random({kTokens, kHidden}, 5);
  const auto up = random({kTokens, kHidden}, 6);
  const auto run = [&](bool fp8) {
    TensorParallel parallel = plain;
    parallel.fp8 = fp8;
    ColumnParallelLinear first(
        {.in = kHidden, .out = kInner, .layout = layout}, parallel, "first");
    RowParallelLinear second(
        {.in = kInner, .out = kHidden, .layout = layout}, parallel, "second");
    parity::give_parts(first, 7);
    parity::give_parts(second, 8);
    first.to(torch::kBFloat16);
    second.to(torch::kBFloat16);
    const auto own = parallel.splits_tokens() ? parallel.part_of(kTokens)
                                              : IndexRange{0, kTokens};
    const auto part = [&](const Tensor& all) {
      return all.slice(0, own.begin, own.end);
    };
    const auto input = part(x).clone().requires_grad_();
    const auto y = second.forward(first.forward(input, kTokens));
    y.backward(part(up));
    return std::vector<Tensor>{
        y.detach(), input.grad(), first.weight.grad(), first.bias.grad(),
        second.weight.grad()};
  };
  const auto exact = run(false), low = run(true);
  for (size_t i = 0; i < exact.size(); ++i) {
    EXPECT_LT(apart(low[i], exact[i]), 0.12) << i;
    // The gradient of a bias is a sum, not a product.
    if (i == 3) continue;
    EXPECT_GT(apart(low[i], exact[i]), 0.01) << i;
  }
}

class Fp8Linear : public testing::TestWithParam<parity::Way> {};
INSTANTIATE_TEST_SUITE_P(
    Ways, Fp8Linear, testing::ValuesIn(parity::ways()),
    testing::PrintToStringParamName());

TEST_P(Fp8Linear, IsCloseToBf16) {
  parity::on_ranks(GetParam(), [&](const TensorParallel& parallel) {
    for (const auto layout : {WeightLayout::out_in, WeightLayout::in_out}) {
      expect_layers(parallel, layout);
    }
  });
}

// By hand: what each of the three products multiplies.
TEST(Fp8, ALayerAndItsGradients) {
  TensorParallel parallel;
  parallel.fp8 = true;
  ColumnParallelLinear layer(
      {.in = 32, .out = 48, .bias = false}, parallel, "a");
  parity::give_parts(layer, 7);
  layer.to(torch::kBFloat16);
  const auto x = random({2, 16, 32}, 1).requires_grad_();
  const auto up = random({2, 16, 48}, 2);
  const auto y = layer.forward(x, 32);
  EXPECT_EQ(y.sizes(), up.sizes());
  y.backward(up);
  const auto rows = x.detach().flatten(0, 1), above = up.flatten(0, 1);
  const auto weight = layer.weight.detach();
  EXPECT_LT(
      apart(y.flatten(0, 1), as_e4m3(rows).mm(as_e4m3(weight).t())), 0.002);
  EXPECT_LT(
      apart(x.grad().flatten(0, 1), as_e5m2(above).mm(as_e4m3(weight))), 0.002);
  EXPECT_LT(
      apart(layer.weight.grad(), as_e5m2(above).t().mm(as_e4m3(rows))), 0.002);
}

}  // namespace echelon::fp8_test
