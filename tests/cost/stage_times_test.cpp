// What each stage of a pipeline takes, and what follows its last microbatch.
#include <gtest/gtest.h>

#include "echelon/cluster/catalogue.h"
#include "echelon/cost/model_catalogue.h"
#include "echelon/cost/step_estimate.h"

namespace echelon {
namespace {

Strategy strategy_of(Layout layout, int64_t batch = 64) {
  Strategy strategy;
  strategy.layout = layout;
  strategy.global_batch = batch;
  return strategy;
}

StageTimes times_of(
    const char* model, const Strategy& strategy,
    const char* cluster = "h100-sxm:2x8") {
  return stage_times(find_model(model), strategy, find_cluster(cluster));
}

TEST(StageTimes, TheEndsOfAPipelineSumATiedEmbedding) {
  const Cluster cluster = find_cluster("h100-sxm:2x8");
  Strategy strategy = strategy_of({.pp = 4});
  const StageTimes times = times_of("gpt2", strategy);
  const double pair = collective_seconds(
      CollectiveKind::all_reduce, 50304.0 * 768 * 4,
      {.ranks = 2, .ranks_per_node = 2}, cluster.node_of(0), cluster,
      find_stack("echelon"));
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
  strategy.schedule = "zb-v";  // one rank has both ends
  EXPECT_EQ(times_of("gpt2", strategy).after[0].tied, 0);
}

TEST(StageTimes, ExpertsAreSummedByThoseThatHaveThem) {
  // Along ep every rank has other experts: their gradients are not summed there.
  const auto gradients = [](Layout layout, int64_t batch) {
    return times_of("mixtral-8x7b", strategy_of(layout, batch)).after[0].gradients;
  };
  EXPECT_LT(gradients({.ep = 8}, 64), gradients({.dp_replicate = 8}, 64) / 8);
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
  const auto other = [&](double host_rate) {
    Cluster cluster = find_cluster("h100-sxm:1x8");
    cluster.groups[0].node.host.bytes_per_second = host_rate;
    return stage_times(find_model("llama3.1-8b"), strategy, cluster)
        .after[0]
        .other;
  };
  const double without = other(63e9);
  strategy.offload_activations = true;
  EXPECT_NEAR(other(1e15), without, 1e-3 * without + 1e-9);
  EXPECT_GT(other(1e9), without + 1);
  EXPECT_GT(other(0.5e9), other(1e9));
  // Less is kept, less is copied.
  const double all = other(1e9);
  strategy.recompute = Recompute::all;
  EXPECT_LT(other(1e9), all / 3);
}

}  // namespace
}  // namespace echelon
