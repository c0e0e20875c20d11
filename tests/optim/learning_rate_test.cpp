#include "echelon/optim/optimizer.h"

#include <gmock/gmock.h>

#include <limits>

#include "echelon/error.h"
#include "tests/support/error_text.h"

namespace echelon::learning_rate_test {

using testing::HasSubstr;

OptimizerOptions with(RateSchedule schedule, int64_t warmup = 0) {
  OptimizerOptions options;
  options.schedule = schedule;
  options.warmup_steps = warmup;
  return options;
}

TEST(LearningRateSchedule, ConstantIsOne) {
  const LearningRateSchedule schedule(with(RateSchedule::constant), 10);
  EXPECT_EQ(schedule.factor(0), 1.0);
  EXPECT_EQ(schedule.factor(9), 1.0);
  EXPECT_EQ(schedule.factor(1000), 1.0);
}

TEST(LearningRateSchedule, WarmUpRisesEvenlyToOne) {
  for (const auto kind :
       {RateSchedule::constant, RateSchedule::cosine, RateSchedule::linear}) {
    const LearningRateSchedule schedule(with(kind, 4), 100);
    EXPECT_DOUBLE_EQ(schedule.factor(0), 0.2);
    EXPECT_DOUBLE_EQ(schedule.factor(1), 0.4);
    EXPECT_DOUBLE_EQ(schedule.factor(3), 0.8);
    EXPECT_DOUBLE_EQ(schedule.factor(4), 1.0);
  }
}

TEST(LearningRateSchedule, CosineAndLinearEndAtTheFinalFactor) {
  auto options = with(RateSchedule::cosine, 2);
  options.final_factor = 0.1;
  const LearningRateSchedule cosine(options, 12);
  EXPECT_DOUBLE_EQ(cosine.factor(7), 0.55);  // half way
  EXPECT_NEAR(cosine.factor(12), 0.1, 1e-15);
  EXPECT_NEAR(cosine.factor(500), 0.1, 1e-15);
  options.schedule = RateSchedule::linear;
  const LearningRateSchedule linear(options, 12);
  EXPECT_DOUBLE_EQ(linear.factor(3), 0.91);
  EXPECT_DOUBLE_EQ(linear.factor(7), 0.55);
  EXPECT_DOUBLE_EQ(linear.factor(12), 0.1);
}

TEST(LearningRateSchedule, StepDropsAtEqualIntervalsAfterTheWarmUp) {
  auto options = with(RateSchedule::step, 1);
  options.step_every = 3;
  options.step_factor = 0.5;
  const LearningRateSchedule schedule(options, 10);
  const double expected[] = {0.5, 1, 1, 1, .5, .5, .5, .25, .25, .25};
  for (int64_t step = 0; step < 10; ++step) {
    EXPECT_DOUBLE_EQ(schedule.factor(step), expected[step]) << step;
  }
}

TEST(LearningRateSchedule, RefusesInvalidOptions) {
  const auto error = [](const OptimizerOptions& options, int64_t steps) {
    return error_text<ConfigError>(
        [&] { LearningRateSchedule(options, steps); });
  };
  EXPECT_THAT(
      error(with(RateSchedule::cosine, 10), 10),
      HasSubstr(
          "warmup_steps=10 must be 0 or more and less than the run's 10"));
  EXPECT_THAT(
      error(with(RateSchedule::cosine, -1), 10), HasSubstr("warmup_steps=-1"));
  EXPECT_THAT(
      error(with(RateSchedule::step), 10), HasSubstr("needs step_every"));
  auto options = with(RateSchedule::cosine);
  options.final_factor = -0.5;
  EXPECT_THAT(error(options, 10), HasSubstr("final_factor=-0.5"));
  options.final_factor = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(error(options, 10), HasSubstr("final_factor"));
  EXPECT_EQ(error(with(RateSchedule::constant), 0), "no error");
}

}  // namespace echelon::learning_rate_test
