// Stages and batches sized to the devices of a mixed cluster.
#include "echelon/planner/device_sizes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "echelon/simulator/simulate.h"
#include "tests/planner/search_job.h"

namespace echelon::planner::device_sizes_test {

PlanRequest request_of(
    const std::string& cluster, int64_t batch,
    std::vector<std::pair<std::string, std::string>> fixed = {}) {
  auto request = plan_request("llama2-13b", cluster, batch, std::move(fixed));
  request.compare = false;
  return request;
}

// How much longer a step takes than another.
double times_as_long(
    const PlanRequest& request, const cost::Strategy& one,
    const cost::Strategy& other) {
  const auto seconds = [&](const cost::Strategy& strategy) {
    return cost::estimate_step(request.model, strategy, request.cluster)
        .step_seconds;
  };
  return seconds(one) / seconds(other);
}

bool has(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

TEST(DeviceSizes, StagesAreInProportionToTheirDevices) {
  const auto request = request_of(
      "a100-80gb:1x8+h100-sxm:1x8", 64,
      {{"pp", "2"}, {"tp", "8"}, {"schedule", "1f1b"}});
  const auto result = plan(request);
  ASSERT_FALSE(result.plans.empty());
  const cost::Strategy& best = result.plans[0].strategy;
  ASSERT_EQ(best.stage_layers.size(), 2u);
  EXPECT_LT(best.stage_layers[0], best.stage_layers[1]);
  EXPECT_EQ(best.stage_layers[0] + best.stage_layers[1], 40);
  // Equal stages take longer.
  cost::Strategy equal = best;
  equal.stage_layers.clear();
  EXPECT_GT(times_as_long(request, equal, best), 1.1);
  const std::string& why = result.reason.why;
  EXPECT_TRUE(has(why, "The devices differ") && has(why, "Stages are sized"))
      << why;
}

TEST(DeviceSizes, BatchesAreInProportionToTheirDevices) {
  const auto request =
      request_of("a100-80gb:1x8+h100-sxm:1x8", 96, {{"pp", "1"}, {"tp", "8"}});
  const auto result = plan(request);
  ASSERT_FALSE(result.plans.empty());
  const cost::Strategy& best = result.plans[0].strategy;
  ASSERT_EQ(best.rank_microbatch.size(), 2u);
  EXPECT_LT(best.rank_microbatch[0], best.rank_microbatch[1]);
  EXPECT_EQ(best.round_samples() * best.num_microbatches(), 96);
  cost::Strategy equal = best;
  equal.rank_microbatch.clear();
  equal.microbatch_size = 1;
  EXPECT_GT(times_as_long(request, equal, best), 1.1);
  EXPECT_TRUE(has(result.reason.why, "Batches of")) << result.reason.why;
}

// Ranks of two kinds need a batch of no multiple of their number.
TEST(DeviceSizes, ABatchThatEqualPartsDoNotDivideIsSharedOut) {
  const auto result = plan(
      request_of("a100-80gb:1x8+h100-sxm:1x8", 7, {{"pp", "1"}, {"tp", "8"}}));
  ASSERT_FALSE(result.plans.empty());
  EXPECT_EQ(result.plans[0].strategy.round_samples(), 7);
}

// A plan on devices of one kind is as it was.
TEST(DeviceSizes, EqualDevicesTakeEqualParts) {
  for (const char* cluster : {"a100-80gb:16", "a100-80gb:1x8+a100-80gb:1x4"}) {
    const auto request = request_of(cluster, 48);
    EXPECT_TRUE(device_speeds(
                    request.model, request.cluster, 0, cluster::Precision::bf16,
                    "echelon")
                    .empty())
        << cluster;
    for (const auto& found : plan(request).plans) {
      EXPECT_TRUE(found.strategy.stage_layers.empty());
      EXPECT_TRUE(found.strategy.rank_microbatch.empty());
    }
  }
}

// The slowest pipeline sets the pace, on whichever devices it runs.
TEST(DeviceSizes, TheEstimateIsThatOfTheSlowestPipeline) {
  const cost::ModelShape model = cost::find_model("gpt3-1.3b");
  const cost::Strategy strategy{
      .layout = {.dp_replicate = 2, .tp = 8}, .global_batch = 16};
  const auto seconds = [&](const char* cluster) {
    return cost::estimate_step(model, strategy, cluster::find_cluster(cluster))
        .step_seconds;
  };
  const double slow_first = seconds("v100:1x8+h100-sxm:1x8");
  const double slow_last = seconds("h100-sxm:1x8+v100:1x8");
  EXPECT_GT(slow_last, 1.5 * seconds("h100-sxm:2x8"));
  EXPECT_NEAR(slow_first, slow_last, 0.2 * slow_first);
}

// Each stage counts the memory of its own device.
TEST(DeviceSizes, EachStageMustFitItsOwnDevice) {
  const cost::ModelShape model = cost::find_model("gpt3-6.7b");
  cost::Strategy strategy;
  strategy.layout = {.dp_replicate = 1, .pp = 2};
  strategy.global_batch = 8;
  strategy.recompute = cost::Recompute::all;
  strategy.stage_layers = {4, 28};
  const auto fits = [&](const char* cluster) {
    return cost::estimate_step(model, strategy, cluster::find_cluster(cluster))
        .fits;
  };
  EXPECT_TRUE(fits("a100-40gb:1x1+h200:1x1"));
  EXPECT_FALSE(fits("h200:1x1+a100-40gb:1x1"));
}

TEST(DeviceSizes, TheSimulatorGivesEachRankItsOwnBatch) {
  const cost::ModelShape model = cost::find_model("gpt3-1.3b");
  const cluster::Cluster cluster =
      cluster::find_cluster("a100-40gb:1x8+h100-sxm:1x8");
  cost::Strategy strategy;
  strategy.layout = {.dp_replicate = 2, .tp = 8};
  strategy.global_batch = 24;
  strategy.microbatch_size = 4;
  strategy.rank_microbatch = {2, 4};
  ASSERT_EQ(strategy.num_microbatches(), 4);
  const auto run =
      simulator::simulate(model, strategy, cluster, {.timeline_ranks = 16});
  const double estimate =
      cost::estimate_step(model, strategy, cluster).step_seconds;
  EXPECT_NEAR(run.step.step_seconds, estimate, 0.05 * estimate);
  strategy.rank_microbatch = {4, 2};
  const auto other =
      simulator::simulate(model, strategy, cluster, {.timeline_ranks = 0});
  EXPECT_GT(other.step.step_seconds, 1.2 * run.step.step_seconds);
}

}  // namespace echelon::planner::device_sizes_test
