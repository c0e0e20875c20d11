#include "echelon/optim/mixed_precision.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <thread>

#include "echelon/error.h"
#include "echelon/optim/optimizer.h"
#include "tests/support/error_text.h"

namespace echelon::autocast_test {

using testing::HasSubstr;
using torch::Tensor;

torch::Dtype dtype_here() {
  static const auto a = torch::ones({2, 2});
  return a.mm(a).scalar_type();
}

class AutocastDtype : public testing::TestWithParam<torch::Dtype> {};
INSTANTIATE_TEST_SUITE_P(
    Dtypes, AutocastDtype, testing::Values(torch::kBFloat16, torch::kHalf),
    [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST_P(AutocastDtype, MatmulsAreLowPrecisionAndLossesAreNot) {
  const auto dtype = GetParam();
  torch::nn::Linear linear(16, 16);
  torch::nn::Conv2d conv(1, 1, 3);
  const auto x = torch::randn({8, 16});
  Tensor loss;
  {
    const Autocast low(torch::kCPU, dtype);
    const auto y = linear(x);
    EXPECT_EQ(y.scalar_type(), dtype);
    EXPECT_EQ(conv(torch::ones({1, 1, 4, 4})).scalar_type(), dtype);
    const auto heads = y.view({1, 2, 8, 8});
    EXPECT_EQ(
        at::scaled_dot_product_attention(heads, heads, heads).scalar_type(),
        dtype);
    loss =
        torch::nn::functional::cross_entropy(y, torch::arange(8).remainder(16));
    EXPECT_EQ(loss.scalar_type(), torch::kFloat32);
  }
  EXPECT_EQ(linear(x).scalar_type(), torch::kFloat32);
  loss.backward();
  EXPECT_EQ(linear->weight.grad().scalar_type(), torch::kFloat32);
}

TEST(Autocast, GuardsNest) {
  EXPECT_EQ(dtype_here(), torch::kFloat32);
  {
    const Autocast outer(torch::kCPU, torch::kBFloat16);
    {
      const Autocast inner(torch::kCPU, torch::kHalf);
      EXPECT_EQ(dtype_here(), torch::kHalf);
      const Autocast off(torch::kCPU, torch::kHalf, /*enabled=*/false);
      EXPECT_EQ(dtype_here(), torch::kFloat32);
    }
    EXPECT_EQ(dtype_here(), torch::kBFloat16);
  }
  EXPECT_EQ(dtype_here(), torch::kFloat32);
}

TEST(Autocast, AnErrorEndsIt) {
  EXPECT_THROW(
      {
        const Autocast low(torch::kCPU, torch::kBFloat16);
        torch::ones({2, 3}).mm(torch::ones({2, 3}));
      },
      c10::Error);
  EXPECT_EQ(dtype_here(), torch::kFloat32);
}

TEST(Autocast, AffectsOnlyThisThread) {
  const Autocast low(torch::kCPU, torch::kBFloat16);
  torch::Dtype other = torch::kInt64;
  std::thread([&] { other = dtype_here(); }).join();
  EXPECT_EQ(other, torch::kFloat32);
}

// The cast of a parameter must not outlive the guard: it would hide updates.
TEST(Autocast, UpdatesBetweenGuardsCount) {
  const auto weight = torch::ones({4, 4}).requires_grad_();
  const auto x = torch::ones({1, 4});
  const auto result = [&] {
    const Autocast low(torch::kCPU, torch::kBFloat16);
    return x.mm(weight).sum().item<float>();
  };
  EXPECT_EQ(result(), 16);
  {
    const torch::NoGradGuard no_grad;
    weight.mul_(2);
  }
  EXPECT_EQ(result(), 32);
  // The end of an inner guard keeps the cast while the outer one lives: both
  // uses share one cast tensor, which sums both gradients.
  {
    const Autocast outer(torch::kCPU, torch::kBFloat16);
    auto loss = x.mm(weight).sum();
    { const Autocast inner(torch::kCPU, torch::kBFloat16); }
    loss = loss + x.mm(weight).sum();
    loss.backward();
  }
  EXPECT_TRUE(weight.grad().equal(torch::full({4, 4}, 2.0f)));
}

// A training loop, with a loss scaler where the dtype needs one.
TEST_P(AutocastDtype, ATrainingLoopConverges) {
  auto weight = torch::full({8, 4}, 0.5).requires_grad_();
  const auto optimizer = make_optimizer(
      OptimizerOptions{
          .name = OptimizerKind::sgd, .learning_rate = 0.05, .weight_decay = 0},
      NamedTensors{{"weight", weight}});
  LossScaler scaler({}, GetParam() == torch::kHalf);
  const auto x = torch::eye(8);
  const auto wanted = torch::arange(32).view({8, 4}).to(torch::kFloat32) / 16;
  for (int step = 0; step < 60; ++step) {
    Tensor loss;
    {
      const Autocast low(torch::kCPU, GetParam());
      loss = (x.mm(weight) - wanted).square().sum();
    }
    (loss * scaler.scale()).backward();
    if (!scaler.active() || scaler.unscale({weight.grad()}, nullptr)) {
      optimizer->step();
    }
    optimizer->zero_grad();
  }
  EXPECT_LT((weight - wanted).abs().max().item<float>(), 0.02);
  EXPECT_LE(scaler.scale(), 65536);
}

TEST(Autocast, RefusesOtherDtypesAndDevices) {
  EXPECT_THAT(
      error_text<ConfigError>([] { Autocast(torch::kCPU, torch::kFloat64); }),
      HasSubstr("Double is no dtype of low precision"));
  EXPECT_THAT(
      error_text<ConfigError>([] { Autocast(torch::kVulkan, torch::kHalf); }),
      HasSubstr("device \"vulkan\""));
  EXPECT_EQ(dtype_here(), torch::kFloat32);
}

}  // namespace echelon::autocast_test
