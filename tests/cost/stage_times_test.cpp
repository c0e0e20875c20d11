// What each stage of a pipeline takes, and what follows its last microbatch.
#include <gtest/gtest.h>

#include "echelon/cluster/catalogue.h"
#include "echelon/cost/model_catalogue.h"
#include "echelon/cost/step_estimate.h"

namespace echelon::cost::stage_times_test {

Strategy strategy_of(Layout layout, int64_t batch = 64) {
  return {.layout = layout, .global_batch = batch};
}

StageTimes times_of(
    const char* model, const Strategy& strategy,
    const char* cluster = "h100-sxm:2x8") {
  return stage_times(
      find_model(model), strategy, cluster::find_cluster(cluster));
}

TEST(StageTimes, TheEndsOfAPipelineSumATiedEmbedding) {
  const cluster::Cluster cluster = cluster::find_cluster("h100-sxm:2x8");
  Strategy strategy = strategy_of({.pp = 4});
  const StageTimes times = times_of("gpt2", strategy);
  const double pair = collective_seconds(
      CollectiveKind::all_reduce, 50304.0 * 768 * 2,
      {.ranks = 2, .ranks_per_node = 2}, cluster.node_of(0), cluster,
      find_framework("echelon"));
  EXPECT_GT(pair, 1e-4);
  EXPECT_EQ(times.after[0].tied, pair);
  EXPECT_EQ(times.after[1].tied, 0);
  EXPECT_EQ(times.after[2].tied, 0);
  EXPECT_EQ(times.after[3].tied, pair);
  // Fourteen stages reach into the other node.
  strategy.layout.pp = 14;
  EXPECT_GT(times_of("gpt2", strategy).after[0].tied, 2 * pair);
  EXPECT_EQ(times_of("llama3.1-8b", strategy).after[0].tied, 0);
  strategy.layout.pp = 4;
  strategy.schedule = ScheduleKind::zb_v;  // one rank has both ends
  EXPECT_EQ(times_of("gpt2", strategy).after[0].tied, 0);
}

TEST(StageTimes, EachStageIsTimedOnItsOwnDevices) {
  const Strategy strategy = strategy_of({.pp = 2});
  const auto mixed = times_of("gpt2", strategy, "a100-80gb:1x1+h100-sxm:1x1");
  const StageTimes slow = times_of("gpt2", strategy, "a100-80gb:2x1");
  const StageTimes fast = times_of("gpt2", strategy, "h100-sxm:2x1");
  for (const size_t stage : {0, 1}) {
    const StageTimes& alone = stage == 0 ? slow : fast;
    EXPECT_EQ(mixed.forward[stage].matrix, alone.forward[stage].matrix);
    EXPECT_EQ(
        mixed.backward_weight[stage].memory,
        alone.backward_weight[stage].memory);
    EXPECT_EQ(mixed.after[stage].optimizer, alone.after[stage].optimizer);
  }
  EXPECT_GT(slow.forward[1].matrix, 1.5 * fast.forward[1].matrix);
  // Ranks of one kind that meet on other nodes differ as well.
  const Strategy pairs = strategy_of({.tp = 2, .pp = 2});
  const StageTimes near = times_of("gpt2", pairs, "h100-sxm:1x2+h100-sxm:2x1");
  EXPECT_GT(
      near.forward[1].exposed[static_cast<size_t>(Axis::tp)],
      2 * near.forward[0].exposed[static_cast<size_t>(Axis::tp)]);
}

TEST(StageTimes, ExpertsAreSummedByThoseThatHaveThem) {
  // Along ep every rank has other experts: their gradients are not summed
  // there.
  const auto gradients = [](Layout layout, int64_t batch) {
    return times_of("mixtral-8x7b", strategy_of(layout, batch))
        .after[0]
        .gradients;
  };
  EXPECT_LT(gradients({.ep = 8}, 64), gradients({.dp_replicate = 8}, 64) / 8);
}

TEST(StageTimes, AStackThatBlocksSendsInItsOwnTime) {
  Strategy strategy = strategy_of({.tp = 4, .pp = 4}, 32);
  strategy.framework = "megatron-2021";
  const StageTimes times = times_of("gpt3-2.7b", strategy, "a100-80gb:2x8");
  const auto pp = static_cast<size_t>(Axis::pp);
  for (size_t stage = 0; stage < 4; ++stage) {
    EXPECT_EQ(times.stages[stage].transfer, 0);
    // The last has no output to send, the first no gradient of an input.
    EXPECT_EQ(times.forward[stage].exposed[pp] > 0, stage < 3);
    EXPECT_EQ(times.backward_input[stage].exposed[pp] > 0, stage > 0);
    const double forward = times.forward[stage].total();
    const double backward = times.again[stage].total() +
                            times.backward_input[stage].total() +
                            times.backward_weight[stage].total();
    EXPECT_NEAR(times.stages[stage].forward, forward, 1e-12);
    EXPECT_NEAR(times.stages[stage].backward, backward, 1e-12);
    EXPECT_NEAR(
        times.stages[stage].backward_input +
            times.stages[stage].backward_weight,
        backward, 1e-12);
  }
}

TEST(StageTimes, ParametersAreGatheredTwiceForAMicrobatchButTheLastLayersOnce) {
  Strategy strategy = strategy_of({.dp_shard = 8}, 32);  // 4 microbatches
  const auto gathers = [&](int64_t stage, bool once) {
    strategy.zero_stage = stage;
    strategy.unshard_once = once;
    return times_of("llama2-7b", strategy, "h100-sxm:1x8").after[0].parameters;
  };
  const cluster::Cluster cluster = cluster::find_cluster("h100-sxm:1x8");
  const double head = collective_seconds(
      CollectiveKind::all_gather, 2.0 * (32000 + 1) * 4096,
      {.ranks = 8, .ranks_per_node = 8}, cluster.node_of(0), cluster,
      find_framework("echelon"));
  const double all = gathers(1, false);
  EXPECT_GT(all, 10 * head);
  EXPECT_NEAR(gathers(2, false), all, 1e-12);
  EXPECT_NEAR(gathers(3, true), all, 1e-12);
  EXPECT_NEAR(gathers(3, false), 4 * (2 * all - head), 1e-9);
}

// Stages 2 and 3 of the trainer reduce after each microbatch.
TEST(StageTimes, GradientsOfStagesTwoAndThreeAreReducedForEachMicrobatch) {
  const auto all = [&](int64_t stage, int64_t batch) {
    Strategy strategy = strategy_of({.dp_shard = 8}, batch);
    strategy.zero_stage = stage;
    return times_of("llama2-7b", strategy, "h100-sxm:1x8").after[0].gradients;
  };
  const double once = all(1, 32);
  EXPECT_GT(once, 0);
  EXPECT_NEAR(all(2, 32), 4 * once, 1e-9);
  EXPECT_NEAR(all(3, 32), 4 * once, 1e-9);
  EXPECT_NEAR(all(2, 8), once, 1e-9);
}

TEST(StageTimes, SayWhetherTheStepFits) {
  const cluster::Device device = cluster::find_device("a100-80gb");
  EXPECT_LT(usable_bytes(device), device.memory_bytes);
  EXPECT_GT(usable_bytes(device), 0.95 * device.memory_bytes);
  const Strategy strategy = strategy_of({.tp = 8}, 8);
  const auto fits = [&](const char* model) {
    return estimate_step(
               find_model(model), strategy,
               cluster::find_cluster("a100-80gb:1x8"))
        .fits;
  };
  EXPECT_TRUE(fits("gpt3-6.7b"));
  EXPECT_FALSE(fits("gpt3-175b"));
  // Two thirds more than there is.
  cluster::Cluster cluster = cluster::find_cluster("a100-80gb:1x8");
  const ModelShape model = find_model("gpt3-6.7b");
  const double peak =
      estimate_step(model, strategy, cluster).memory.peak_bytes();
  cluster.groups[0].node.device.memory_bytes = 0.6 * peak;
  EXPECT_FALSE(estimate_step(model, strategy, cluster).fits);
}

TEST(StageTimes, AnOptimizerUpdatesItsPartAlone) {
  Strategy whole = strategy_of({.dp_replicate = 8});
  Strategy part = strategy_of({.dp_shard = 8});
  for (const int64_t stage : {1, 2, 3}) {
    part.zero_stage = stage;
    EXPECT_NEAR(
        times_of("llama3.1-8b", whole).after[0].optimizer /
            times_of("llama3.1-8b", part).after[0].optimizer,
        8, 0.1);
  }
}

TEST(StageTimes, OffloadingActivationsCostsWhatComputingDoesNotHide) {
  Strategy strategy = strategy_of({.tp = 8}, 8);
  const auto times = [&](double host_rate) {
    cluster::Cluster cluster = cluster::find_cluster("h100-sxm:1x8");
    cluster.groups[0].node.host.bytes_per_second = host_rate;
    return stage_times(find_model("llama3.1-8b"), strategy, cluster);
  };
  const auto other = [&](double host_rate) {
    return times(host_rate).after[0].other;
  };
  const double without = other(63e9);
  strategy.offload_activations = true;
  EXPECT_NEAR(other(1e15), without, 1e-3 * without + 1e-9);
  // At half the rate both copies take twice as long. The rest is what the
  // forward and backward hide of them.
  const StageCost stage = times(1e9).stages[0];
  const double both_copies = other(0.5e9) - other(1e9);
  EXPECT_NEAR(
      other(1e9) - without,
      both_copies - static_cast<double>(strategy.num_microbatches()) *
                        (stage.forward + stage.backward),
      1e-9 * both_copies);
  // Where less is kept, less is copied.
  const double all = other(1e9);
  strategy.recompute = Recompute::all;
  EXPECT_LT(other(1e9), all / 3);
}

}  // namespace echelon::cost::stage_times_test
