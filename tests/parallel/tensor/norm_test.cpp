// Norms on all tokens and on sharded ones.
#include "echelon/parallel/tensor/norm.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "echelon/counting/meta_mode.h"
#include "echelon/layers/computing_device.h"
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

// What a residual sum and its norm give on a CPU, to the bit, with the
// gradients to both.
template <class Norm>
void check_sums(Norm norm) {
  parity::give_parts(norm, 1);
  const auto g = random({3, 6}, 4), passed = random({3, 6}, 5);
  for (const bool adds : {true, false}) {
    std::vector<Tensor> found, expected;
    for (auto* all : {&found, &expected}) {
      norm.zero_grad();
      const auto x = random({3, 6}, 2).requires_grad_();
      const auto added = random({3, 6}, 3).requires_grad_();
      NormedSum sums;
      if (all == &found) {
        sums = norm.forward_sum(x, adds ? added : Tensor());
      } else {
        sums.sum = adds ? x + added : x;
        sums.norm = norm.forward(sums.sum);
      }
      torch::autograd::backward({sums.norm, sums.sum}, {g, passed});
      *all = {sums.norm, sums.sum, x.grad()};
      if (adds) all->push_back(added.grad());
      for (const auto& one : norm.parameters()) all->push_back(one.grad());
    }
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(found[i].equal(expected[i])) << adds << " " << i;
    }
  }
}

TEST(NormOfASum, IsTheSumAndTheNormOnCpus) {
  check_sums(RMSNorm(6, kEps, TensorParallel{}));
  check_sums(LayerNorm(6, kEps, TensorParallel{}));
}

// The graph of the kernel of GPUs, on tensors without numbers.
template <class Norm>
void check_graph() {
  const CountedFor gpu(torch::kCUDA);
  LayerList layers;
  layers.add(
      "norm",
      [] {
        auto norm = std::make_shared<Norm>(64, kEps, TensorParallel{});
        norm->to(torch::kBFloat16);
        return norm;
      },
      [](Norm& norm, const Tensor& x) { return norm.forward(x); });
  const auto module = counting::build_on_meta(layers[0]).module;
  auto& norm = dynamic_cast<Norm&>(*module);
  const auto low = torch::dtype(torch::kBFloat16).device(torch::kMeta);
  const auto g = torch::empty({2, 3, 64}, low);
  const auto check = [&](bool adds, bool trains, bool flows,
                         const std::string& used) {
    SCOPED_TRACE(
        used + (adds ? ", added" : "") + (trains ? "" : ", frozen") +
        (flows ? "" : ", of inputs without gradients"));
    norm.zero_grad();
    for (auto& one : norm.parameters()) one.requires_grad_(trains);
    const auto x = torch::empty({2, 3, 64}, low).requires_grad_(flows);
    const auto added = torch::empty({2, 3, 64}, low).requires_grad_(flows);
    const auto [sum, normal] = norm.forward_sum(x, adds ? added : Tensor());
    EXPECT_EQ(normal.sizes(), x.sizes());
    EXPECT_EQ(sum.scalar_type(), torch::kBFloat16);
    if (used == "norm") normal.backward(g);
    if (used == "sum") sum.backward(g);
    if (used == "both") torch::autograd::backward({normal, sum}, {g, g});
    EXPECT_EQ(x.grad().defined(), flows);
    EXPECT_EQ(added.grad().defined(), flows && adds);
    for (const auto& item : norm.named_parameters()) {
      const auto& gradient = item.value().grad();
      ASSERT_EQ(gradient.defined(), trains && used != "sum") << item.key();
      if (gradient.defined()) {
        EXPECT_EQ(gradient.sizes(), item.value().sizes());
      }
    }
  };
  for (const bool adds : {true, false}) {
    for (const bool trains : {true, false}) {
      for (const std::string used : {"norm", "sum", "both"}) {
        check(adds, trains, true, used);
      }
    }
    check(adds, true, false, "norm");
  }
}

TEST(NormOfASum, HasGradientsOfAllThatNeedThem) {
  check_graph<RMSNorm>();
  check_graph<LayerNorm>();
}

}  // namespace echelon::norm_test
