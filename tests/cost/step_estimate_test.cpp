// Times of operations, collectives and steps against limits and formulas.
#include "echelon/cost/step_estimate.h"

#include <gtest/gtest.h>

#include "echelon/cluster/catalogue.h"
#include "echelon/cost/layer_work.h"
#include "echelon/cost/model_catalogue.h"

namespace echelon::cost::step_estimate_test {

Strategy strategy_on(Layout layout, int64_t batch) {
  return {.layout = layout, .global_batch = batch};
}

TEST(MatrixTime, SharesOfThePeakAreThoseMeasuredAndOddDepthIsSlow) {
  const cluster::Device device = cluster::find_device("a100-80gb");
  const DeviceRates rates = rates_of(device);
  const auto flops = [&](int64_t n) {
    const double work =
        2.0 * static_cast<double>(n * n) * static_cast<double>(n);
    return work /
           matrix_seconds(n, n, n, cluster::Precision::fp16, device, rates);
  };
  EXPECT_NEAR(flops(8192) / 1e12, 253.7, 25);
  EXPECT_LT(flops(1024), flops(8192));
  EXPECT_GT(
      matrix_seconds(
          4096, 50257, 2048, cluster::Precision::fp16, device, rates),
      1.5 * matrix_seconds(
                4096, 50304, 2048, cluster::Precision::fp16, device, rates));
}

TEST(StepEstimate, PartsSumToTheStepAndDegreeOneHasNoCommunication) {
  const cluster::Cluster cluster = cluster::find_cluster("a100-80gb:1x8");
  const StepEstimate one =
      estimate_time(find_model("gpt2"), strategy_on({}, 8), cluster);
  EXPECT_NEAR(one.parts.total(), one.step_seconds, 1e-9 * one.step_seconds);
  for (const double axis : one.communication) EXPECT_EQ(axis, 0);
  EXPECT_EQ(one.parts.bubble, 0);
}

TEST(StepEstimate, UtilisationIsOfTheDevicesThatTheJobHas) {
  const ModelShape model = find_model("gpt2");
  const auto expect_peak = [&](const char* cluster, double peak) {
    const StepEstimate step = estimate_time(
        model, strategy_on({.dp_replicate = 12}, 12),
        cluster::find_cluster(cluster));
    const double flops = 12 * model.model_flops(1024, false);
    EXPECT_NEAR(
        step.model_flops_utilisation * step.step_seconds, flops / peak,
        1e-9 * flops / peak)
        << cluster;
    EXPECT_NEAR(step.tokens_per_second * step.step_seconds, 12 * 1024, 1e-6);
  };
  const auto peak = [](const char* device) {
    return cluster::find_device(device).peak(cluster::Precision::bf16);
  };
  expect_peak("a100-80gb:4x8", 12 * peak("a100-80gb"));
  expect_peak(
      "a100-80gb:1x8+h100-sxm:2x8",
      8 * peak("a100-80gb") + 4 * peak("h100-sxm"));
}

// `[precision] reduce = "same"` sends bf16 gradients as they are.
TEST(StepEstimate, GradientsAreSentInTheTypeInWhichTheyAreSummed) {
  Strategy strategy = strategy_on({.dp_replicate = 8}, 64);
  const auto seconds = [&] {
    return estimate_time(
               find_model("gpt3-13b"), strategy,
               cluster::find_cluster("a100-80gb:1x8"))
        .communication[static_cast<size_t>(Axis::dp_replicate)];
  };
  const double same = seconds();
  strategy.reduce = ReduceDtype::bf16;
  EXPECT_EQ(seconds(), same);
  strategy.reduce = ReduceDtype::float32;
  EXPECT_NEAR(seconds() / same, 2, 0.1);
  strategy.precision = cluster::Precision::fp32;
  strategy.reduce = ReduceDtype::same;
  EXPECT_NEAR(seconds() / same, 2, 0.1);
}

TEST(PipelineSeconds, BubbleOf1F1BIsTheFormulasAlsoWhereItIsExtrapolated) {
  for (const int64_t microbatches : {8, 64, 500}) {
    const Strategy strategy = strategy_on({.pp = 4}, microbatches);
    const std::vector<StageCost> stages(
        4, StageCost{.forward = 1, .backward = 2});
    EXPECT_NEAR(
        pipeline_seconds(strategy, stages),
        3.0 * static_cast<double>(microbatches + 3), 1e-9);
  }
}

TEST(
    PipelineSeconds, AStackThatValidatesAfterwardsTakesAsLongAsItsLongestRank) {
  Strategy strategy = strategy_on({.pp = 4}, 16);
  strategy.schedule = ScheduleKind::zb_h2;
  const std::vector<StageCost> stages(4);  // 1 for each of F, I and W
  strategy.framework = "zero-bubble";
  EXPECT_NEAR(pipeline_seconds(strategy, stages), 3.0 * 16, 1e-9);
  strategy.framework = "zero-bubble-synchronous";
  EXPECT_NEAR(pipeline_seconds(strategy, stages), 3.0 * 16 + 3, 1e-9);
  // Rank 0 of 1F1B works from the step's begin to its end.
  strategy.schedule = ScheduleKind::one_f_one_b;
  const double waits = pipeline_seconds(strategy, stages);
  strategy.framework = "zero-bubble";
  EXPECT_EQ(pipeline_seconds(strategy, stages), waits);
}

/// Ten operators and a collective among four ranks.
Operations ten_and_a_sum(double collective_bytes) {
  Operations operations;
  for (int i = 0; i < 10; ++i) operations.push_back({.bytes = 1e3});
  operations.push_back(
      {.kind = OperationKind::collective,
       .bytes = collective_bytes,
       .axis = Axis::tp});
  return operations;
}

TEST(PassSeconds, TheHostLaunchesAheadOfCollectivesUnlessLaunchesWait) {
  const cluster::Cluster cluster = cluster::find_cluster("a100-80gb:1x8");
  Strategy strategy = strategy_on({.tp = 4}, 1);
  strategy.graphs = false;
  Framework framework = find_framework("echelon");
  framework.host_seconds = 1e-3;
  framework.host_spread = 0;
  const double launches = 11e-3;
  const auto pass = [&](double bytes) {
    return pass_seconds(ten_and_a_sum(bytes), strategy, cluster, framework);
  };
  EXPECT_NEAR(pass(1e3).total(), launches, 1e-9);  // the host is all there is
  const PassSeconds large = pass(1e10);
  EXPECT_GT(large.exposed[5], launches);
  EXPECT_EQ(large.host, 0);
  framework.launches_wait = true;
  EXPECT_NEAR(pass(1e10).host, launches, 1e-9);
  EXPECT_NEAR(pass(1e10).total(), large.total() + launches, 1e-9);
  // The slowest of four hosts is a standard deviation behind.
  framework.host_spread = 0.1;
  EXPECT_NEAR(pass(1e10).host, 1.1 * launches, 1e-9);
}

TEST(StepEstimate, ATiedHeadIsUpdatedOnceWhereTheEmbeddingIsOnItsRank) {
  const cluster::Cluster cluster = cluster::find_cluster("a100-80gb:1x8");
  const auto optimizer = [&](const std::string& schedule, int64_t pp,
                             bool tied) {
    ModelShape model = find_model("gpt2");
    model.transformer->tied = tied;
    Strategy strategy = strategy_on({.pp = pp}, 8);
    strategy.schedule = schedule_kind(schedule);
    const StageTimes times = stage_times(model, strategy, cluster);
    double sum = 0;
    for (const auto& after : times.after) sum += after.optimizer;
    return sum;
  };
  EXPECT_LT(optimizer("1f1b", 1, true), 0.8 * optimizer("1f1b", 1, false));
  EXPECT_EQ(optimizer("1f1b", 2, true), optimizer("1f1b", 2, false));
  EXPECT_LT(optimizer("zb-v", 2, true), 0.8 * optimizer("zb-v", 2, false));
}

}  // namespace echelon::cost::step_estimate_test
