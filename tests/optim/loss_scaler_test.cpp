#include "echelon/optim/mixed_precision.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <atomic>
#include <cmath>

#include "echelon/comm/world.h"
#include "echelon/error.h"
#include "tests/support/error_text.h"

namespace echelon::loss_scaler_test {

using testing::AllOf;
using testing::HasSubstr;
using torch::Tensor;

constexpr auto kInfinity = std::numeric_limits<float>::infinity();
const SumOverRanks kAlone;

Tensor numbers(torch::Dtype dtype = torch::kFloat32) {
  return torch::tensor({8.0, -16.0, 1024.0}, dtype);
}

TEST(LossScaler, DividesGradientsOfEveryDtype) {
  LossScaler scaler({.initial_loss_scale = 8}, /*dynamic=*/true);
  EXPECT_TRUE(scaler.active());
  std::vector<Tensor> gradients = {Tensor()};
  for (const auto dtype :
       {torch::kFloat32, torch::kFloat64, torch::kBFloat16, torch::kHalf}) {
    gradients.push_back(numbers(dtype));
    gradients.push_back(torch::empty({0}, dtype));
  }
  // A view of a flat gradient.
  const auto flat = torch::full({10}, 8.0f);
  gradients.push_back(flat.narrow(0, 3, 4));
  EXPECT_TRUE(scaler.unscale(gradients, kAlone));
  for (const auto& gradient : gradients) {
    if (!gradient.defined() || gradient.numel() != 3) continue;
    EXPECT_TRUE(gradient.equal(numbers(gradient.scalar_type()) / 8));
  }
  EXPECT_EQ(flat.sum().item<float>(), 6 * 8 + 4 * 1);
  EXPECT_EQ(scaler.scale(), 8);
}

// 1/3 is not exact in float32; float64 gradients must still be exact.
TEST(LossScaler, Float64KeepsItsDigits) {
  LossScaler scaler({.loss_scale = 3}, /*dynamic=*/false);
  const auto gradient = torch::tensor({1.0, 7.0}, torch::kFloat64);
  EXPECT_TRUE(scaler.unscale({gradient}, kAlone));
  EXPECT_EQ(gradient[0].item<double>(), 1.0 / 3);
  EXPECT_EQ(gradient[1].item<double>(), 7.0 / 3);
}

TEST(LossScaler, DoublesAfterGoodStepsAndHalvesAtAnOverflow) {
  LossScaler scaler(
      {.initial_loss_scale = 16, .loss_scale_growth = 3}, /*dynamic=*/true);
  const auto step = [&](float value) {
    return scaler.unscale({torch::tensor({1.0f, value})}, kAlone);
  };
  EXPECT_TRUE(step(1) && step(1));
  EXPECT_EQ(scaler.scale(), 16);
  EXPECT_TRUE(step(1));
  EXPECT_EQ(scaler.scale(), 32);
  EXPECT_TRUE(step(1) && step(1));
  EXPECT_FALSE(step(kInfinity));
  EXPECT_EQ(scaler.scale(), 16);
  EXPECT_FALSE(step(std::nanf("")));
  EXPECT_EQ(scaler.scale(), 8);
  EXPECT_EQ(scaler.state().overflows, 2);
  // Earlier good steps no longer count.
  EXPECT_TRUE(step(1) && step(1));
  EXPECT_EQ(scaler.state().overflows, 0);
  EXPECT_EQ(scaler.scale(), 8);
  EXPECT_TRUE(step(1));
  EXPECT_EQ(scaler.scale(), 16);
}

TEST(LossScaler, AFixedScaleStays) {
  LossScaler scaler(
      {.loss_scale = 128, .loss_scale_growth = 1}, /*dynamic=*/false);
  EXPECT_TRUE(scaler.active());
  EXPECT_TRUE(scaler.unscale({torch::ones({2})}, kAlone));
  EXPECT_FALSE(scaler.unscale({torch::full({2}, kInfinity)}, kAlone));
  EXPECT_EQ(scaler.scale(), 128);
  EXPECT_FALSE(LossScaler({}, /*dynamic=*/false).active());
  EXPECT_EQ(LossScaler({}, /*dynamic=*/false).scale(), 1);
}

// The optimizer divides them as it reads them.
TEST(LossScaler, ChecksGradientsAndLeavesThem) {
  LossScaler checked({.initial_loss_scale = 8, .loss_scale_growth = 2}, true);
  LossScaler divided({.initial_loss_scale = 8, .loss_scale_growth = 2}, true);
  const std::vector<float> largest = {1,          kInfinity,     3,    3,
                                      -kInfinity, std::nanf(""), 65504};
  for (const auto dtype :
       {torch::kFloat32, torch::kFloat64, torch::kBFloat16, torch::kHalf}) {
    for (const float value : largest) {
      const auto gradient = torch::tensor({1.0f, value, 2.0f}).to(dtype);
      const auto before = gradient.clone();
      const double scale = divided.scale();
      const auto found = checked.check_on_device(
          {Tensor(), torch::empty({0}, dtype), gradient, numbers(dtype)},
          kAlone);
      EXPECT_TRUE(gradient[0].equal(before[0]));
      EXPECT_TRUE(gradient.isfinite().equal(before.isfinite()));
      const bool good =
          divided.unscale({gradient.clone(), numbers(dtype)}, kAlone);
      EXPECT_EQ(found[0].item<double>(), good ? 0 : 1) << value << dtype;
      EXPECT_EQ(found[1].item<double>(), scale);
      EXPECT_EQ(checked.scale(), divided.scale());
      EXPECT_EQ(checked.state().overflows, divided.state().overflows);
    }
  }
}

// With gradients of zero the scale would double until it is infinite.
TEST(LossScaler, StaysFinite) {
  LossScaler scaler(
      {.initial_loss_scale = 0x1p125, .loss_scale_growth = 1}, true);
  for (int i = 0; i < 5; ++i) {
    EXPECT_TRUE(scaler.unscale({torch::zeros({2})}, kAlone));
  }
  EXPECT_EQ(scaler.scale(), 0x1p126);
}

TEST(LossScaler, StopsAfterOverflowsInARow) {
  PrecisionOptions options{.initial_loss_scale = 1024, .max_overflows = 4};
  LossScaler scaler(options, /*dynamic=*/true);
  const auto overflow = [&] {
    return scaler.unscale({torch::full({1}, kInfinity)}, kAlone);
  };
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(overflow());
  EXPECT_TRUE(scaler.unscale({torch::ones({1})}, kAlone));
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(overflow());
  EXPECT_THAT(
      error_text<NumericError>(overflow),
      AllOf(
          HasSubstr("in 4 steps in a row"), HasSubstr("halved down to 16;"),
          HasSubstr("compute = \"bf16\""), HasSubstr("learning_rate"),
          HasSubstr("clip_norm")));

  options.loss_scale = 512;
  LossScaler fixed(options, /*dynamic=*/false);
  EXPECT_THAT(
      error_text<NumericError>([&] {
        for (;;) fixed.unscale({torch::full({1}, kInfinity)}, kAlone);
      }),
      HasSubstr("[precision] loss_scale = 512;"));
}

// One element on one rank suffices; all ranks then continue together.
TEST(LossScaler, AllRanksSkipTogether) {
  for (const int ranks : {2, 3}) {
    std::atomic<int> checked = 0;
    run_ranks(ranks, [&](World& world) {
      LossScaler scaler(
          {.initial_loss_scale = 4, .loss_scale_growth = 2}, true);
      const SumOverRanks sum = [&](Tensor& found) {
        world.group().all_reduce(found, ReduceOp::sum, {.label = "overflow"});
      };
      for (int step = 0; step < 2 * ranks; ++step) {
        // A rank without gradients takes part as well.
        auto gradient = torch::ones({world.rank() == 0 ? 0 : 3});
        if (world.rank() == 0) gradient = torch::ones({1});
        const bool bad = step < ranks;
        if (bad && step == world.rank()) gradient[-1] = kInfinity;
        const auto before = world.history().count();
        EXPECT_EQ(scaler.unscale({gradient}, sum), !bad);
        EXPECT_EQ(world.history().count(), before + 1);
      }
      EXPECT_EQ(
          scaler.scale(), 4 * std::pow(0.5, ranks) * std::pow(2.0, ranks / 2));
      ++checked;
    });
    EXPECT_EQ(checked, ranks);
  }
}

TEST(LossScaler, ItsStateIsRestored) {
  const PrecisionOptions options{
      .initial_loss_scale = 64, .loss_scale_growth = 3, .max_overflows = 3};
  LossScaler scaler(options, true);
  const auto step = [](LossScaler& one, bool good) {
    one.unscale({torch::full({1}, good ? 1.0f : kInfinity)}, kAlone);
  };
  for (const bool good : {false, false, true, true}) step(scaler, good);
  LossScaler other(options, true);
  other.load_state(scaler.state());
  step(scaler, true);
  step(other, true);
  EXPECT_EQ(scaler.scale(), 32);
  EXPECT_EQ(other.scale(), 32);
  step(scaler, false);
  step(scaler, false);
  other.load_state(scaler.state());
  EXPECT_THROW(step(other, false), NumericError);
  EXPECT_THAT(
      error_text<CheckpointError>([&] { other.load_state({.scale = -1}); }),
      HasSubstr("a loss scale of -1"));
}

TEST(LossScaler, RefusesInvalidScales) {
  EXPECT_THAT(
      error_text<ConfigError>(
          [] { LossScaler({.initial_loss_scale = 1e39}, true); }),
      HasSubstr("initial_loss_scale=1e+39"));
  EXPECT_THAT(
      error_text<ConfigError>(
          [] { LossScaler({.loss_scale = kInfinity}, false); }),
      HasSubstr("loss_scale=inf"));
}

}  // namespace echelon::loss_scaler_test
