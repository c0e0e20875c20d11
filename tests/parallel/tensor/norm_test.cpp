// Norms on all tokens and on sharded ones.
#include "echelon/parallel/tensor/norm.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/parallel/tensor/parts.h"
#include "tests/support/error_text.h"

namespace echelon::norm_test {

using parity::on_ranks;
using parity::random;
using torch::Tensor;

constexpr double kEps = 1e-5;

// The formula of Hugging Face's LlamaRMSNorm.
Tensor plain_rms_norm(const Tensor& x, const Tensor& weight) {
  const auto low = x.scalar_type() != torch::kFloat64;
  const auto h = low ? x.to(torch::kFloat32) : x;
  const auto variance = h.pow(2).mean({-1}, true);
  return weight * (h * torch::rsqrt(variance + kEps)).to(x.scalar_type());
}

class NormParity : public testing::TestWithParam<parity::Way> {};

template <class Norm, class Plain>
void check(const parity::Way& way, const Plain& plain) {
  on_ranks(way, [&](const TensorParallel& tp) {
    Norm norm(6, kEps, tp);
    const auto whole = parity::give_parts(norm, 1);
    parity::expect_layer(
        norm, tp, whole,
        {.x = random({2, 5, 6}, 2), .cotangent = random({2, 5, 6}, 3)},
        [&](const Tensor& x) { return plain(x, whole); },
        [&](const Tensor& x) { return norm.forward(x); });
  });
}

TEST_P(NormParity, LayerNorm) {
  check<LayerNorm>(GetParam(), [](const Tensor& x, const auto& whole) {
    return at::layer_norm(x, {6}, whole.at("weight"), whole.at("bias"), kEps);
  });
}

TEST_P(NormParity, RMSNorm) {
  check<RMSNorm>(GetParam(), [](const Tensor& x, const auto& whole) {
    return plain_rms_norm(x, whole.at("weight"));
  });
}

INSTANTIATE_TEST_SUITE_P(
    Ways, NormParity, testing::ValuesIn(parity::ways()),
    testing::PrintToStringParamName());

class RmsNormDtype : public testing::TestWithParam<torch::Dtype> {};

TEST_P(RmsNormDtype, MatchesTheOriginalModel) {
  // More rows than go through the cache at once.
  const auto dtype = GetParam();
  const auto x = random({300, 512}, 4).mul(3).to(dtype).requires_grad_();
  const auto weight = random({512}, 5).to(dtype).requires_grad_();
  const auto cotangent = random({300, 512}, 6).to(dtype);
  const auto expected = plain_rms_norm(x, weight);
  const auto y = rms_norm(x, weight, kEps);
  EXPECT_EQ(y.scalar_type(), dtype);
  const double tolerance = dtype == torch::kFloat32 ? 1e-6 : 0.008;
  parity::expect_tensor("y", expected, y, tolerance);

  // The gradient equals that of the same numbers in float64.
  const auto exact_x = x.detach().to(torch::kFloat64).requires_grad_();
  const auto exact_w = weight.detach().to(torch::kFloat64).requires_grad_();
  plain_rms_norm(exact_x, exact_w).backward(cotangent.to(torch::kFloat64));
  y.backward(cotangent);
  EXPECT_EQ(x.grad().scalar_type(), dtype);
  EXPECT_EQ(weight.grad().scalar_type(), dtype);
  parity::expect_tensor("gradient of x", exact_x.grad(), x.grad(), tolerance);
  parity::expect_tensor(
      "gradient of weight", exact_w.grad(), weight.grad(), tolerance);
}

INSTANTIATE_TEST_SUITE_P(
    Dtypes, RmsNormDtype,
    testing::Values(torch::kFloat32, torch::kBFloat16, torch::kHalf));

TEST(RmsNorm, OneGradientAlone) {
  const auto x = random({3, 4}, 1);
  const auto weight = random({4}, 2);
  for (const bool of_x : {true, false}) {
    const auto a = x.detach().requires_grad_(of_x);
    const auto b = weight.detach().requires_grad_(!of_x);
    rms_norm(a, b, kEps).sum().backward();
    const auto c = x.detach().requires_grad_(of_x);
    const auto d = weight.detach().requires_grad_(!of_x);
    plain_rms_norm(c, d).sum().backward();
    parity::expect_tensor("x", c.grad(), a.grad());
    parity::expect_tensor("weight", d.grad(), b.grad());
  }
}

TEST(RmsNorm, MetaTensorsAndSecondDerivatives) {
  const auto meta = torch::empty(
      {2, 3, 4}, torch::TensorOptions(torch::kMeta).requires_grad(true));
  const auto weight = torch::ones({4}, torch::kMeta);
  const auto y = rms_norm(meta, weight, kEps);
  EXPECT_EQ(y.sizes(), meta.sizes());
  y.sum().backward();
  EXPECT_EQ(meta.grad().sizes(), meta.sizes());

  const auto x = random({3, 4}, 1).requires_grad_();
  const auto loss = rms_norm(x, random({4}, 2), kEps).sum();
  EXPECT_NE(
      error_text([&] {
        torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true);
      }).find("without create_graph"),
      std::string::npos);
}

}  // namespace echelon::norm_test
