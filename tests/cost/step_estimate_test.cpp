// Times of operations, collectives and steps against limits and formulas.
#include "echelon/cost/step_estimate.h"

#include <gtest/gtest.h>

#include "echelon/cluster/catalogue.h"
#include "echelon/cost/layer_work.h"
#include "echelon/cost/model_catalogue.h"

namespace echelon {
namespace {

Strategy strategy_on(Layout layout, int64_t batch) {
  Strategy strategy;
  strategy.layout = layout;
  strategy.global_batch = batch;
  return strategy;
}

GroupPlace inside(int64_t ranks) { return {.ranks = ranks, .ranks_per_node = ranks}; }

TEST(CollectiveTime, AGroupOfOneCostsNothing) {
  const Cluster cluster = find_cluster("a100-80gb:2x8");
  for (const CollectiveKind kind :
       {CollectiveKind::all_reduce, CollectiveKind::all_gather,
        CollectiveKind::all_to_all, CollectiveKind::send}) {
    EXPECT_EQ(
        collective_seconds(
            kind, 1e9, inside(1), cluster.node_of(0), cluster, find_stack("echelon")),
        0);
  }
}

TEST(CollectiveTime, LargeAllReduceOfEightA100ReachesTheMeasuredBusBandwidth) {
  const Cluster cluster = find_cluster("a100-80gb:1x8");
  const double bytes = 8589934592.0;
  const double seconds = collective_seconds(
      CollectiveKind::all_reduce, bytes, inside(8), cluster.node_of(0), cluster,
      find_stack("echelon"));
  EXPECT_NEAR(2 * 7.0 / 8 * bytes / seconds / 1e9, 231.6, 0.05 * 231.6);
}

TEST(CollectiveTime, MoreBandwidthIsNeverSlower) {
  Cluster slow = find_cluster("a100-80gb:2x8"), fast = slow;
  fast.groups[0].node.network.bytes_per_second *= 2;
  const GroupPlace place{.ranks = 16, .ranks_per_node = 8, .nodes = 2};
  for (const double bytes : {1e3, 1e6, 1e9}) {
    const auto seconds = [&](const Cluster& cluster) {
      return collective_seconds(
          CollectiveKind::all_reduce, bytes, place, cluster.node_of(0), cluster,
          find_stack("echelon"));
    };
    EXPECT_LE(seconds(fast), seconds(slow));
  }
}

TEST(MatrixTime, SharesOfThePeakAreThoseMeasuredAndOddDepthIsSlow) {
  const Device device = find_device("a100-80gb");
  const DeviceRates rates = rates_of(device);
  const auto flops = [&](int64_t n) {
    const double work = 2.0 * static_cast<double>(n * n) * static_cast<double>(n);
    return work / matrix_seconds(n, n, n, Precision::fp16, device, rates);
  };
  EXPECT_NEAR(flops(8192) / 1e12, 253.7, 25);
  EXPECT_LT(flops(1024), flops(8192));
  EXPECT_GT(
      matrix_seconds(4096, 50257, 2048, Precision::fp16, device, rates),
      1.5 * matrix_seconds(4096, 50304, 2048, Precision::fp16, device, rates));
}

TEST(StepEstimate, PartsSumToTheStepAndDegreeOneHasNoCommunication) {
  const Cluster cluster = find_cluster("a100-80gb:1x8");
  const StepEstimate one =
      estimate_time(find_model("gpt2"), strategy_on({}, 8), cluster);
  EXPECT_NEAR(one.parts.total(), one.step_seconds, 1e-9 * one.step_seconds);
  for (const double axis : one.communication) EXPECT_EQ(axis, 0);
  EXPECT_EQ(one.parts.bubble, 0);
}

TEST(PipelineSeconds, BubbleOf1F1BIsTheFormulasAlsoWhereItIsExtrapolated) {
  for (const int64_t microbatches : {8, 64, 500}) {
    const Strategy strategy = strategy_on({.pp = 4}, microbatches);
    const std::vector<StageCost> stages(4, StageCost{.forward = 1, .backward = 2});
    EXPECT_NEAR(
        pipeline_seconds(strategy, stages),
        3.0 * static_cast<double>(microbatches + 3), 1e-9);
  }
}

}  // namespace
}  // namespace echelon
