// Collectives against the terms of their formulas, one at a time.
#include <gtest/gtest.h>
#include <functional>

#include "echelon/cluster/catalogue.h"
#include "echelon/cost/framework.h"
#include "echelon/cost/operation_time.h"

namespace echelon::cost::collective_formula_test {

constexpr double kTiny = 1e-3;  // bytes
constexpr double kLarge = 1e11;

class CollectiveFormula : public testing::Test {
 protected:
  double
  seconds(CollectiveKind kind, double bytes, const GroupPlace& place) const {
    return collective_seconds(
        kind, bytes, place, cluster_.node_of(0), cluster_,
        find_framework("echelon"));
  }
  const DeviceRates& rates() const {
    return rates_of(cluster_.node_of(0).device);
  }

  cluster::Cluster cluster_ = cluster::find_cluster("a100-80gb:4x8");
};

GroupPlace inside(int64_t ranks) {
  return {.ranks = ranks, .ranks_per_node = ranks};
}

TEST_F(CollectiveFormula, AGroupOfOneCostsNothing) {
  for (const CollectiveKind kind :
       {CollectiveKind::all_reduce, CollectiveKind::all_gather,
        CollectiveKind::all_to_all, CollectiveKind::send}) {
    EXPECT_EQ(seconds(kind, 1e9, inside(1)), 0);
  }
}

TEST_F(CollectiveFormula, EightA100ReachTheMeasuredBusBandwidth) {
  const double bytes = 8589934592.0;
  const double taken = seconds(CollectiveKind::all_reduce, bytes, inside(8));
  EXPECT_NEAR(2 * 7.0 / 8 * bytes / taken / 1e9, 231.6, 0.05 * 231.6);
}

TEST_F(CollectiveFormula, MoreBandwidthIsNeverSlower) {
  const GroupPlace place{.ranks = 16, .ranks_per_node = 8, .nodes = 2};
  double& rate = cluster_.groups[0].node.network.bytes_per_second;
  for (const double bytes : {1e3, 1e6, 1e9}) {
    const double slow = seconds(CollectiveKind::all_reduce, bytes, place);
    rate *= 2;
    EXPECT_LE(seconds(CollectiveKind::all_reduce, bytes, place), slow);
    rate /= 2;
  }
}

TEST_F(CollectiveFormula, EachRankOfARingAddsAHop) {
  for (const auto& [kind, times] :
       {std::pair(CollectiveKind::all_gather, 1.0),
        std::pair(CollectiveKind::reduce_scatter, 1.0),
        std::pair(CollectiveKind::all_reduce, 2.0)}) {
    EXPECT_NEAR(
        seconds(kind, kTiny, inside(8)) - seconds(kind, kTiny, inside(4)),
        times * 4 * rates().hop_seconds, 1e-9);
    EXPECT_GE(seconds(kind, kTiny, inside(2)), rates().start_seconds);
  }
}

TEST_F(CollectiveFormula, AnAllReduceMovesTwiceWhatAGatherDoes) {
  for (const int64_t ranks : {2, 4, 8}) {
    EXPECT_NEAR(
        seconds(CollectiveKind::all_reduce, kLarge, inside(ranks)) /
            seconds(CollectiveKind::all_gather, kLarge, inside(ranks)),
        2, 0.01);
  }
  // (n - 1) / n of the tensor, at a rate that grows a little with the ring.
  EXPECT_NEAR(
      seconds(CollectiveKind::all_gather, kLarge, inside(8)) /
          seconds(CollectiveKind::all_gather, kLarge, inside(4)),
      (7.0 / 8) / (3.0 / 4) * (4 / (4 + rates().ring_ramp)) /
          (8 / (8 + rates().ring_ramp)),
      0.01);
}

TEST_F(CollectiveFormula, BetweenNodesTheAdaptersCount) {
  GroupPlace one{.ranks = 4, .ranks_per_node = 1, .nodes = 4, .sharing = 8};
  GroupPlace all{.ranks = 32, .ranks_per_node = 8, .nodes = 4};
  const double alone = seconds(CollectiveKind::all_gather, kLarge, one);
  // Eight adapters move for a group that has all of a node's devices.
  EXPECT_LT(seconds(CollectiveKind::all_gather, kLarge, all), alone / 6);
  one.across_racks = true;
  cluster_.oversubscription = 3;
  EXPECT_NEAR(
      seconds(CollectiveKind::all_gather, kLarge, one) / alone, 3, 0.01);
}

TEST_F(CollectiveFormula, AMessageInsideANodeHasALinkToItself) {
  const double rate =
      cluster_.node_of(0).inside.bytes_per_second * rates().ring_share;
  EXPECT_NEAR(
      seconds(CollectiveKind::send, kLarge, inside(2)), kLarge / rate,
      0.001 * kLarge / rate);
}

TEST_F(CollectiveFormula, DevicesOnOneBusShareIt) {
  cluster_ = cluster::find_cluster("l4:1x8");
  GroupPlace pair = inside(2);
  const double alone = seconds(CollectiveKind::all_gather, kLarge, pair);
  pair.sharing = 4;
  EXPECT_NEAR(
      seconds(CollectiveKind::all_gather, kLarge, pair) / alone, 4, 0.01);
}

TEST_F(CollectiveFormula, AllToAllSendsWhatIsNotTheRanksOwn) {
  EXPECT_NEAR(
      seconds(CollectiveKind::all_to_all, kLarge, inside(8)) /
          seconds(CollectiveKind::all_gather, kLarge, inside(8)),
      1, 0.05);
  const GroupPlace far{.ranks = 32, .ranks_per_node = 8, .nodes = 4};
  // Three quarters leave the node, each rank's through its own adapter.
  const double adapter =
      cluster_.node_of(0).network.bytes_per_second * rates().network_share;
  EXPECT_NEAR(
      seconds(CollectiveKind::all_to_all, kLarge, far), 0.75 * kLarge / adapter,
      0.02 * kLarge / adapter);
}

Strategy strategy_of(Layout layout) {
  return {.layout = layout, .global_batch = 64};
}

TEST_F(CollectiveFormula, GroupsLieWhereTheirRanksAre) {
  cluster_.nodes_per_rack = 2;
  const Strategy strategy = strategy_of({.dp_replicate = 4, .tp = 8});
  const GroupPlace tp = place_of(strategy, cluster_, Axis::tp);
  EXPECT_EQ(tp.ranks, 8);
  EXPECT_EQ(tp.nodes, 1);
  EXPECT_FALSE(tp.across_racks);
  const GroupPlace dp = place_of(strategy, cluster_, Axis::dp_replicate);
  EXPECT_EQ(dp.ranks, 4);
  EXPECT_EQ(dp.ranks_per_node, 1);
  EXPECT_EQ(dp.nodes, 4);
  EXPECT_EQ(dp.sharing, 8);
  EXPECT_TRUE(dp.across_racks);
  const GroupPlace both =
      place_of(strategy, cluster_, {Axis::dp_replicate, Axis::tp});
  EXPECT_EQ(both.ranks, 32);
  EXPECT_EQ(both.ranks_per_node, 8);
  EXPECT_EQ(place_of(strategy, cluster_, Axis::cp).ranks, 1);
}

TEST_F(CollectiveFormula, AGroupIsAcrossRacksFromTheFirstRankBeyondOne) {
  cluster_.nodes_per_rack = 2;
  const auto across = [&](int64_t copies) {
    return place_of(
               strategy_of({.dp_replicate = copies, .tp = 8}), cluster_,
               Axis::dp_replicate)
        .across_racks;
  };
  EXPECT_FALSE(across(2));
  EXPECT_TRUE(across(3));
}

TEST_F(CollectiveFormula, SlicesOfAMessageLeaveThroughTheirOwnAdapters) {
  const Strategy strategy = strategy_of({.tp = 8, .pp = 4});
  const auto transfer = [&](const char* framework) {
    return transfer_seconds(
        strategy, cluster_, find_framework(framework), 1e9, 0, 8);
  };
  EXPECT_LT(transfer("megatron-2021"), transfer("echelon") / 3);
  EXPECT_EQ(
      transfer_seconds(
          strategy, cluster_, find_framework("echelon"), 1e9, 5, 5),
      0);
}

TEST(PassTime, TheHostsLaunchesAreALowerBound) {
  const cluster::Cluster cluster = cluster::find_cluster("h100-sxm:1x8");
  const Framework& framework = find_framework("echelon");
  Operations operations;
  for (int i = 0; i < 100; ++i)
    operations.push_back({.name = "small", .bytes = 64});
  Strategy strategy = strategy_of({});
  strategy.graphs = false;
  const PassSeconds pass =
      pass_seconds(operations, strategy, cluster, framework);
  EXPECT_NEAR(
      pass.total(), 100 * framework.host_seconds + framework.layer_host_seconds,
      1e-12);
  // A captured step has the device's own overhead alone.
  strategy.graphs = true;
  const auto captured = pass_seconds(operations, strategy, cluster, framework);
  EXPECT_EQ(captured.host, 0);
  EXPECT_EQ(captured.total(), pass.memory);
  for (const auto& change : std::vector<std::function<void(Strategy&)>>{
           [](Strategy& one) { one.offload_optimizer = true; },
           [](Strategy& one) { one.offload_activations = true; },
           [](Strategy& one) { one.layout.ep = 2; }}) {
    Strategy other = strategy;
    change(other);
    EXPECT_GT(pass_seconds(operations, other, cluster, framework).host, 0);
  }
  strategy.graphs = false;
  operations.push_back({.name = "large", .bytes = 1e10});
  EXPECT_EQ(pass_seconds(operations, strategy, cluster, framework).host, 0);
}

TEST(PassTime, WhatCanBeHiddenIs) {
  const cluster::Cluster cluster = cluster::find_cluster("h100-sxm:1x8");
  const Framework& framework = find_framework("echelon");
  Operations operations;
  operations.push_back(
      {.kind = OperationKind::collective,
       .name = "sum",
       .bytes = 1e9,
       .axis = Axis::tp,
       .hideable = 0.75});
  const PassSeconds pass =
      pass_seconds(operations, strategy_of({.tp = 8}), cluster, framework);
  const auto tp = static_cast<size_t>(Axis::tp);
  EXPECT_GT(pass.communication[tp], 1e-3);
  EXPECT_NEAR(pass.exposed[tp], 0.25 * pass.communication[tp], 1e-12);
  EXPECT_NEAR(
      pass.memory, 0.75 * pass.communication[tp] * framework.overlap_slowdown,
      1e-12);
}

}  // namespace echelon::cost::collective_formula_test
