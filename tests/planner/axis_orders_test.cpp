// The orders of a layout's axes that the search leaves out have nothing to win.
#include "echelon/planner/axis_orders.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <limits>

#include "echelon/cluster/catalogue.h"
#include "echelon/planner/search.h"
#include "tests/planner/search_job.h"

namespace echelon::planner::axis_orders_test {

using testing::ElementsAre;

std::vector<int>
kept_of(const std::string& layout, const std::string& cluster) {
  return orders_that_differ(
      parse_layout(layout), {0, 1, 2}, cluster::find_cluster(cluster));
}

TEST(AxisOrders, EachIsOfAllAxesAndTheUsualOneIsFirst) {
  EXPECT_EQ(axis_orders().front(), kAxes);
  for (AxisOrder order : axis_orders()) {
    std::ranges::sort(order);
    EXPECT_EQ(order, kAxes);
  }
}

TEST(AxisOrders, OneWhereNoneMatters) {
  EXPECT_THAT(kept_of("fsdp=2,pp=2,tp=2", "a100-80gb:1x8"), ElementsAre(0));
  EXPECT_THAT(kept_of("dp=2,fsdp=2,pp=2", "a100-80gb:1x8"), ElementsAre(0));
  EXPECT_THAT(kept_of("fsdp=8,tp=8", "a100-80gb:8x8"), ElementsAre(0));
  // Each node is a rank of all axes but tp.
  EXPECT_THAT(
      kept_of("dp=2,fsdp=2,pp=2,tp=8", "a100-80gb:8x8"), ElementsAre(0));
  EXPECT_THAT(kept_of("fsdp=8,pp=2,tp=4", "a100-80gb:8x8"), ElementsAre(0, 1));
  EXPECT_THAT(
      kept_of("dp=4,fsdp=2,pp=4,tp=2", "a100-80gb:8x8"), ElementsAre(0, 1, 2));
  // With the pipeline between dp and fsdp, a node still holds one pipeline and
  // its fsdp ranks.
  EXPECT_THAT(
      kept_of("dp=8,fsdp=2,pp=2,tp=2", "a100-80gb:8x8"), ElementsAre(0, 1));
}

TEST(AxisOrders, AllThatDifferOnAMixedCluster) {
  const char* mixed = "a100-80gb:1x8+h100-sxm:1x8";
  EXPECT_THAT(kept_of("fsdp=8,pp=2", mixed), ElementsAre(0, 1));
  EXPECT_THAT(kept_of("pp=2,tp=8", mixed), ElementsAre(0));
}

// Every order that is left out has one that is kept and takes exactly as long.
TEST(AxisOrders, WhatIsLeftOutTakesAsLongAsOneThatIsKept) {
  std::vector<cluster::Cluster> clusters = {
      cluster::find_cluster("a100-40gb:2x4"),
      cluster::find_cluster("a100-40gb:4x2"),
      cluster::find_cluster("a100-40gb:4x3"),
      cluster::find_cluster("a100-40gb:1x12"),
      cluster::find_cluster("a100-40gb:3x4")};
  clusters.push_back(clusters[1]);
  clusters.back().nodes_per_rack = 2;
  clusters.back().oversubscription = 4;
  int64_t left_out = 0;
  for (const cluster::Cluster& cluster : clusters) {
    const SearchJob job = search_job("gpt2", cluster, 24);
    for (cost::Strategy strategy : list_groups(job)) {
      if (strategy.layout.pp > 1) strategy.schedule = ScheduleKind::one_f_one_b;
      strategy.zero_stage = strategy.layout.dp_shard > 1 ? 3 : 0;
      if (strategy.layout.order != kAxes) continue;  // the first of all
      if (!cost::check_strategy(job.model, strategy, cluster).empty()) continue;
      const auto seconds_in = [&](size_t order) {
        strategy.layout.order = axis_orders()[order];
        return cost::estimate_step(job.model, strategy, cluster).step_seconds;
      };
      std::vector<double> kept;
      for (const int order :
           orders_that_differ(strategy.layout, {0, 1, 2}, cluster)) {
        kept.push_back(seconds_in(static_cast<size_t>(order)));
      }
      left_out += static_cast<int64_t>(3 - kept.size());
      for (size_t order = 0; order < 3; ++order) {
        const double seconds = seconds_in(order);
        EXPECT_TRUE(std::ranges::any_of(kept, [&](double one) {
          return std::abs(one - seconds) <= 1e-12 * seconds;
        })) << cost::to_string(strategy);
      }
    }
  }
  EXPECT_GT(left_out, 100);
}

// Among strategies that fit without savings, the best of all possible orders is
// no faster than the plan found.
TEST(AxisOrders, NoOtherOrderIsFaster) {
  struct Case {
    const char* model;
    const char* cluster;
    int64_t batch;
  };
  for (const Case& one :
       {Case{"gpt2", "a100-40gb:2x4", 16}, Case{"gpt2-xl", "v100:4x4", 32},
        Case{"llama-1b", "l4:2x4", 16}, Case{"resnet50", "v100:4x2", 256}}) {
    const SearchJob job =
        search_job(one.model, cluster::find_cluster(one.cluster), one.batch);
    double best = std::numeric_limits<double>::infinity();
    std::string name;
    for (const cost::Strategy& group : list_groups(job)) {
      if (group.layout.order != kAxes) continue;
      for (cost::Strategy strategy : list_variants(job, group)) {
        auto axes = strategy.layout.used_axes();
        std::ranges::sort(axes);
        do {
          auto& order = strategy.layout.order;
          std::stable_partition(order.begin(), order.end(), [&](Axis axis) {
            return strategy.layout.degree(axis) == 1;
          });
          std::copy_backward(axes.begin(), axes.end(), order.end());
          if (!cost::check_strategy(job.model, strategy, job.cluster).empty())
            continue;
          const auto step =
              cost::estimate_step(job.model, strategy, job.cluster);
          if (!step.fits || step.step_seconds >= best) continue;
          best = step.step_seconds;
          name = cost::to_string(strategy);
        } while (std::next_permutation(axes.begin(), axes.end()));
      }
    }
    const auto found = search(job, 3);
    ASSERT_FALSE(found.best.empty());
    EXPECT_LE(found.best[0].step.step_seconds, best * (1 + 1e-9))
        << one.model << " on " << one.cluster << ": " << name;
  }
}

// Stages that cross the slow network leave the nodes to the data-parallel
// ranks.
TEST(AxisOrders, PipelinesCrossNodesWhereThatIsFaster) {
  SearchJob job =
      search_job("llama2-7b", cluster::find_cluster("a100-80gb:2x8"), 64);
  const auto seconds =
      [&](std::vector<std::pair<std::string, std::string>> fixed) {
        fixed.insert(fixed.end(), {{"pp", "2"}, {"fsdp", "8"}});
        job.constraints = Constraints(fixed);
        const auto found = search(job, 1);
        return found.best.empty() ? -1 : found.best[0].step.step_seconds;
      };
  const double usual = seconds({{"order", "dp:fsdp:pp:cp:ep:tp"}});
  const double outer = seconds({{"order", "pp:dp:fsdp:cp:ep:tp"}});
  EXPECT_GT(outer, 0);
  EXPECT_LT(outer, usual);
  EXPECT_EQ(seconds({}), outer);
}

}  // namespace echelon::planner::axis_orders_test
