// A strategy as people read it.
#include "echelon/cost/strategy.h"

#include <gtest/gtest.h>

namespace echelon::cost::strategy_test {

TEST(StrategyText, SaysWhatIsNotUsual) {
  Strategy strategy{.global_batch = 8};
  EXPECT_EQ(to_string(strategy), "dp=1 · 8 microbatches of 1");
  strategy.microbatch_size = 8;
  strategy.stages_per_rank = 1;
  EXPECT_EQ(to_string(strategy), "dp=1 · 1 microbatch of 8");
  strategy.layout = {.dp_shard = 2, .tp = 2, .pp = 2};
  strategy.global_batch = 64;
  strategy.zero_stage = 1;
  strategy.sequence_parallel = true;
  EXPECT_EQ(
      to_string(strategy),
      "fsdp=2,pp=2,tp=2 · sequence parallel · ZeRO 1 · 4 microbatches of 8 · "
      "1f1b");
  strategy.schedule = ScheduleKind::interleaved;
  strategy.stages_per_rank = 3;
  strategy.recompute = Recompute::all;
  strategy.offload_optimizer = strategy.offload_activations = true;
  EXPECT_EQ(
      to_string(strategy),
      "fsdp=2,pp=2,tp=2 · sequence parallel · ZeRO 1 · 4 microbatches of 8 · "
      "interleaved, 3 stages a rank · recompute all · optimizer offloaded · "
      "activations offloaded");
}

TEST(StrategyText, OfDevicesOfSeveralKindsHasTheirSizes) {
  Strategy strategy;
  strategy.layout = {.dp_replicate = 4, .pp = 3};
  strategy.rank_microbatch = {2, 2, 2, 6};
  strategy.microbatch_size = 6;
  strategy.global_batch = 24;
  strategy.stage_layers = {3, 5, 5};
  strategy.recompute = Recompute::selective;
  strategy.recompute_layers = 1;
  EXPECT_EQ(
      to_string(strategy),
      "dp=4,pp=3 · 2 microbatches of 3 x 2, 6 · 1f1b · stages of 3, 2 x 5 "
      "layers · "
      "recompute selective in 1 layer a stage");
}

TEST(StrategyText, RanksInAnotherOrderAreNamed) {
  Strategy strategy;
  strategy.layout = {.dp_replicate = 2, .dp_shard = 2, .tp = 2, .pp = 2};
  strategy.global_batch = 4;
  const std::string usual = to_string(strategy);
  const std::string degrees = to_string(strategy.layout);
  strategy.layout.order = {Axis::pp, Axis::dp_replicate, Axis::dp_shard,
                           Axis::cp, Axis::ep,           Axis::tp};
  EXPECT_EQ(
      to_string(strategy),
      degrees + ",order=pp:dp:fsdp:tp" + usual.substr(degrees.size()));
  // Axes of one rank have no place.
  strategy.layout.order = {Axis::cp, Axis::dp_replicate, Axis::dp_shard,
                           Axis::pp, Axis::ep,           Axis::tp};
  EXPECT_EQ(to_string(strategy), usual);
}

}  // namespace echelon::cost::strategy_test
