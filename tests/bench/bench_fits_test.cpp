#include "echelon/bench/bench_fits.h"

#include <gtest/gtest.h>

namespace echelon {
namespace bench_fits_test {

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

TEST(BenchFits, TheLargestOfSeveralNormalNumbers) {
  EXPECT_NEAR(usual_largest(1), 0, 1e-9);
  EXPECT_NEAR(usual_largest(2), 0.5449521, 1e-6);  // the 0.7071 quantile
  EXPECT_NEAR(usual_largest(4), 0.9981488, 1e-6);
  EXPECT_LT(usual_largest(8), usual_largest(9));
}

TEST(BenchFits, JitterIsOfAMillisecond) {
  // Four times as long: twice the wait.
  EXPECT_NEAR(fit_jitter(2, 1e-3, 20e-6), 20e-6 / 0.5449521, 1e-11);
  EXPECT_NEAR(fit_jitter(2, 4e-3, 40e-6), 20e-6 / 0.5449521, 1e-11);
  EXPECT_NEAR(fit_jitter(4, 1e-3, 20e-6), 20e-6 / 0.9981488, 1e-11);
  EXPECT_EQ(fit_jitter(2, 1e-3, -5e-6), 0);  // noise
  EXPECT_EQ(fit_jitter(1, 1e-3, 20e-6), 0);
}

const HostWork kWork{50e-6, 3e-6, 7e-6, 8e-6, 120e-6};
const SmallSteps kSteps{.ranks = 3, .of_data = {1, 5}, .of_pipeline = {4, 16}};

// What the host's work adds to the steps of the networks.
std::vector<double> of_data(const HostWork& work) {
  const auto seconds = [&](int64_t layers, int64_t microbatches) {
    return work.step_seconds +
           static_cast<double>(microbatches) * work.pass_seconds +
           static_cast<double>(layers) * work.layer_seconds;
  };
  return {
      seconds(kSteps.few_layers, kSteps.of_data.few),
      seconds(kSteps.few_layers, kSteps.of_data.many),
      seconds(kSteps.many_layers, kSteps.of_data.few)};
}

std::vector<double> of_pipeline(const HostWork& work, int64_t ranks) {
  std::vector<double> seconds;
  for (const int64_t count :
       {kSteps.of_pipeline.few, kSteps.of_pipeline.many}) {
    const auto actions = static_cast<double>(2 * (count + ranks - 1));
    seconds.push_back(work.pipeline_seconds + actions * work.action_seconds);
  }
  return seconds;
}

std::vector<double> slowed_down(std::vector<double> seconds) {
  for (double& one : seconds) one = 1.6 * one + 20e-6;
  return seconds;
}

// A round in which the machine was slow counts for nothing.
TEST(BenchFits, TheHostsWorkIsFound) {
  const auto usual = of_data(kWork);
  const HostWork found =
      fit_host_work(kSteps, {usual, slowed_down(usual), usual});
  EXPECT_NEAR(found.step_seconds, kWork.step_seconds, 1e-12);
  EXPECT_NEAR(found.layer_seconds, kWork.layer_seconds, 1e-12);
  EXPECT_NEAR(found.pass_seconds, kWork.pass_seconds, 1e-12);
  EXPECT_EQ(found.action_seconds, 0);
  EXPECT_EQ(found.pipeline_seconds, 0);
}

TEST(BenchFits, WhatAPipelineAddsIsFound) {
  for (const int64_t ranks : {2, 3}) {
    SmallSteps steps = kSteps;
    steps.ranks = ranks;
    const auto usual = of_pipeline(kWork, ranks);
    HostWork work = kWork;
    work.action_seconds = work.pipeline_seconds = 0;
    const HostWork found =
        with_pipeline_work(work, steps, {slowed_down(usual), usual, usual});
    EXPECT_NEAR(found.action_seconds, kWork.action_seconds, 1e-12) << ranks;
    EXPECT_NEAR(found.pipeline_seconds, kWork.pipeline_seconds, 1e-12) << ranks;
    EXPECT_EQ(found.step_seconds, kWork.step_seconds);
    EXPECT_EQ(found.pass_seconds, kWork.pass_seconds);
  }
}

TEST(BenchFits, OneRankHasNoPipeline) {
  SmallSteps steps = kSteps;
  steps.ranks = 1;
  EXPECT_EQ(with_pipeline_work(kWork, steps, {{}, {}}), kWork);
}

TEST(BenchFits, NoWorkTakesLessThanNoTime) {
  // Shorter than predicted; and less with more of it.
  EXPECT_EQ(fit_host_work(kSteps, {{-5e-6, -9e-6, -7e-6}}), HostWork{});
  EXPECT_EQ(
      fit_host_work(kSteps, {{5e-6, 3e-6, 2e-6}}),
      (HostWork{.step_seconds = 5e-6}));
  EXPECT_EQ(with_pipeline_work({}, kSteps, {{-1e-6, -2e-6}}), HostWork{});
}

// Elsewhere takes 100 us, and layers 12 us more in all behind it. Of five
// microbatches a rank alone passes five times, one of three stages seven times
// a third of the layers.
TEST(BenchFits, TimeElsewhereAndSlowerLayersAreNoHostWork) {
  EXPECT_NEAR(
      longer_than_predicted(
          {.elsewhere = 100e-6,
           .step = 900e-6,
           .pass = 172e-6,
           .plain_pass = 60e-6},
          1, 5, 310e-6),
      (900 - 5 * 112 - 310) * 1e-6, 1e-12);
  EXPECT_NEAR(
      longer_than_predicted(
          {.elsewhere = 100e-6,
           .step = 1000e-6,
           .pass = 372e-6,
           .plain_pass = 60e-6},
          3, 5, 200e-6),
      (1000 - 7 * 104 - 200) * 1e-6, 1e-12);
  EXPECT_NEAR(
      longer_than_predicted(
          {.step = 90e-6, .pass = 6e-6, .plain_pass = 6e-6}, 2, 4, 50e-6),
      40e-6, 1e-12);
}

// 6, 12 and 36 us more behind 50 us elsewhere in each of two stages.
TEST(BenchFits, SlowerLayersAreSharedAmongTheirKindsOfOperators) {
  std::vector<SmallSeconds> rounds;
  for (const double slower : {6e-6, 36e-6, 12e-6}) {
    rounds.push_back(
        {.elsewhere = 50e-6, .pass = 160e-6 + slower, .plain_pass = 60e-6});
  }
  EXPECT_NEAR(fit_operator(rounds, 2, 6), 2e-6, 1e-12);
  rounds.assign(3, {.pass = 59e-6, .plain_pass = 60e-6});
  EXPECT_EQ(fit_operator(rounds, 1, 6), 0);
}

TEST(BenchFits, MedianOfTwoIsTheLower) {
  EXPECT_EQ(median({3}), 3);
  EXPECT_EQ(median({4, 2}), 2);
  EXPECT_EQ(median({9, 1, 5}), 5);
}

}  // namespace bench_fits_test
}  // namespace echelon
