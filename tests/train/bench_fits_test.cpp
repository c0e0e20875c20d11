#include "echelon/train/bench_fits.h"

#include <gtest/gtest.h>

namespace echelon {
namespace {

TEST(BenchFits, LaunchesOfBothKindsAreFound) {
  const OperatorCounts linear{8, 40}, functions{18, 6};
  const auto seconds = [](const OperatorCounts& counts) {
    return counts.computing * 2.5e-6 + counts.views * 0.3e-6;
  };
  const Launches found =
      fit_launches(linear, seconds(linear), functions, seconds(functions));
  EXPECT_NEAR(found.computing, 2.5e-6, 1e-15);
  EXPECT_NEAR(found.view, 0.3e-6, 1e-15);
}

TEST(BenchFits, LaunchesAreAlikeWhereOneWouldTakeNoTime) {
  // A view would take less than nothing, then what computes.
  for (const auto& [a, b] : {std::pair(10e-6, 60e-6), std::pair(60e-6, 1e-6)}) {
    const Launches found = fit_launches({10, 30}, a, {20, 10}, b);
    EXPECT_NEAR(found.computing, (a + b) / 70, 1e-15);
    EXPECT_EQ(found.computing, found.view);
  }
}

// Seconds of a step as the host's work makes them.
std::vector<double> round_of(
    const SmallSteps& steps, const HostWork& work, double all_reduce) {
  constexpr double kLayer = 30e-6;  // of a microbatch
  std::vector<double> seconds;
  const auto rest = [&](int64_t layers) {
    return work.step_seconds + all_reduce +
           static_cast<double>(layers) * work.layer_seconds;
  };
  for (const int64_t layers : {steps.few_layers, steps.many_layers}) {
    for (const int64_t count : {steps.of_data.few, steps.of_data.many}) {
      seconds.push_back(
          rest(layers) + static_cast<double>(count * layers) * kLayer);
    }
  }
  if (steps.ranks == 1) return seconds;
  const double microbatch =
      static_cast<double>(steps.few_layers) * kLayer + 2 * work.action_seconds;
  for (const int64_t count : {steps.of_pipeline.few, steps.of_pipeline.many}) {
    seconds.push_back(
        rest(steps.few_layers) + work.pipeline_seconds +
        static_cast<double>(count + steps.ranks - 1) * microbatch);
  }
  return seconds;
}

TEST(BenchFits, TheHostsWorkIsFound) {
  SmallSteps steps{.of_data = {1, 5}, .of_pipeline = {4, 16}};
  const HostWork work{50e-6, 3e-6, 8e-6, 120e-6};
  for (const int64_t ranks : {1, 2, 3}) {
    steps.ranks = ranks;
    const double all_reduce = ranks == 1 ? 0 : 4e-6;
    // A round in which the machine was slow counts for nothing.
    std::vector<double> slow = round_of(steps, work, all_reduce);
    for (double& seconds : slow) seconds *= 1.6;
    const HostWork found = fit_host_work(
        steps,
        {round_of(steps, work, all_reduce), slow,
         round_of(steps, work, all_reduce)},
        all_reduce);
    EXPECT_NEAR(found.step_seconds, work.step_seconds, 1e-12) << ranks;
    EXPECT_NEAR(found.layer_seconds, work.layer_seconds, 1e-12) << ranks;
    const bool staged = ranks > 1;
    EXPECT_NEAR(
        found.action_seconds, staged ? work.action_seconds : 0, 1e-12);
    EXPECT_NEAR(
        found.pipeline_seconds, staged ? work.pipeline_seconds : 0, 1e-12);
  }
}

TEST(BenchFits, NoWorkTakesLessThanNoTime) {
  const SmallSteps steps{.ranks = 2, .of_data = {1, 5}, .of_pipeline = {4, 16}};
  const HostWork found =
      fit_host_work(steps, {{5e-4, 9e-4, 1e-4, 5e-4, 1e-4, 2e-4}}, 1);
  EXPECT_EQ(found, HostWork{});
}

TEST(BenchFits, MedianOfTwoIsTheLower) {
  EXPECT_EQ(median({3}), 3);
  EXPECT_EQ(median({4, 2}), 2);
  EXPECT_EQ(median({9, 1, 5}), 5);
}

}  // namespace
}  // namespace echelon
