// Ways of context parallelism: what each costs, and which is chosen.
#include "echelon/cost/context_way.h"

#include <gmock/gmock.h>

#include <array>

#include "echelon/cluster/catalogue.h"
#include "echelon/cost/collective_time.h"
#include "echelon/cost/framework.h"
#include "echelon/cost/layer_work.h"
#include "echelon/cost/memory_estimate.h"
#include "echelon/cost/model_catalogue.h"
#include "echelon/cost/step_estimate.h"

namespace echelon::cost::context_way_test {

using ::testing::HasSubstr;
using ::testing::StartsWith;

Strategy cut(int64_t cp, const ContextParallelOptions& context = {}) {
  return {
      .layout = {.cp = cp},
      .context = context,
      .zero_stage = 3,
      .global_batch = 1,
      .seq_len = 32768};
}

StepEstimate step_of(
    const Strategy& strategy, const char* cluster = "h100-sxm:8",
    const char* model = "llama3-8b") {
  return estimate_step(
      find_model(model), strategy, cluster::find_cluster(cluster));
}

double sent(const StepEstimate& step) {
  return step.communication[index_of(Axis::cp)];
}
double exposed(const StepEstimate& step) {
  return step.parts.exposed[index_of(Axis::cp)];
}

TEST(ContextWay, GroupsOfNeighboursAreWithinANode) {
  const auto cluster = cluster::find_cluster("h100-sxm:2x8");
  const Strategy strategy = cut(16);
  EXPECT_EQ(
      place_of_part(strategy, cluster, Axis::cp, 16, 1),
      place_of(strategy, cluster, Axis::cp));
  const GroupPlace near = place_of_part(strategy, cluster, Axis::cp, 8, 1);
  EXPECT_EQ(near.nodes, 1);
  EXPECT_EQ(near.ranks_per_node, 8);
  EXPECT_EQ(near.sharing, 1);
  const GroupPlace far = place_of_part(strategy, cluster, Axis::cp, 2, 8);
  EXPECT_EQ(far.nodes, 2);
  EXPECT_EQ(far.ranks_per_node, 1);
  EXPECT_EQ(far.sharing, 8);
}

// Long sequences hide a ring, and no other way.
TEST(ContextWay, AttentionHidesTheRing) {
  const StepEstimate ring = step_of(cut(8, {ContextWay::ring}));
  EXPECT_GT(sent(ring), 0);
  EXPECT_EQ(exposed(ring), 0);
  Strategy brief = cut(8, {ContextWay::ring});
  brief.seq_len = 1024;
  const StepEstimate waits = step_of(brief);
  EXPECT_GT(exposed(waits), 0);
  EXPECT_LT(exposed(waits), sent(waits));
  for (const ContextWay way : {ContextWay::all_gather, ContextWay::ulysses}) {
    const StepEstimate step = step_of(cut(8, {way}));
    EXPECT_GT(sent(step), 0) << to_string(way);
    EXPECT_DOUBLE_EQ(exposed(step), sent(step)) << to_string(way);
  }
}

// All heads are sent once each way, however many ranks there are; keys and
// values pass to all others.
TEST(ContextWay, AnExchangeOfHeadsSendsLess) {
  const auto sent_by = [&](int64_t cp, ContextWay way) {
    return sent(step_of(cut(cp, {way}), "h100-sxm:32", "llama2-7b"));
  };
  EXPECT_LT(
      sent_by(8, ContextWay::ulysses), sent_by(8, ContextWay::all_gather));
  EXPECT_LT(sent_by(8, ContextWay::ulysses), sent_by(8, ContextWay::ring));
}

TEST(ContextWay, ScoresThatAreMaskedTakeLongerAndMoreMemory) {
  const StepEstimate fused = step_of(cut(8, {ContextWay::ring}));
  Strategy masked = cut(8, {ContextWay::ring});
  masked.masks_attention = true;
  const StepEstimate step = step_of(masked);
  EXPECT_GT(step.step_seconds, 1.5 * fused.step_seconds);
  const auto working = [](const Strategy& strategy) {
    return block_bytes(
               find_model("llama3-8b"), strategy, find_framework("echelon"),
               false, Recompute::none)
        .working;
  };
  EXPECT_GT(working(masked), working(cut(8, {ContextWay::ring})));
}

// In elements of a rank's results: those of another block are three quarters.
// Each is added to a sum, which takes two reads and a write, and the sum is
// written once more in the order of the tokens. In 16 bits, sums have 32.
TEST(ContextWay, ResultsOfBlocksAreMerged) {
  const ModelShape model = find_model("gpt2");
  const auto moved = [&](const Strategy& strategy) {
    const Framework& framework = find_framework(strategy.framework);
    const LayerWork block = layer_work(model, strategy, framework).at(1);
    double bytes = 0;
    for (const Operation& one : block.forward) {
      if (one.name == "merge blocks") bytes += one.bytes;
    }
    return bytes;
  };
  Strategy two = cut(2, {ContextWay::ring});
  const double results = 32768.0 / 2 * 768;
  EXPECT_DOUBLE_EQ(moved(two), 2 * results * (3 + 0.75 * (3 + 6) + 3 + 2));
  two.precision = cluster::Precision::fp32;
  EXPECT_DOUBLE_EQ(moved(two), 4 * results * (0.75 * 3 + 2));
  two.context.way = ContextWay::ulysses;  // one block
  EXPECT_DOUBLE_EQ(moved(two), 4 * results * 2);
  EXPECT_EQ(moved(cut(1)), 0);
  two.framework = "megatron-core";
  EXPECT_EQ(moved(two), 0);
}

TEST(ContextWay, MemoryFallsWithTheRanks) {
  const auto activations = [&](int64_t cp, ContextWay way) {
    const auto step = step_of(cut(cp, {way}));
    return static_cast<double>(
        step.memory.ranks.at(0)[timeline::MemoryKind::activations]);
  };
  for (const ContextWay way : {ContextWay::ring, ContextWay::ulysses}) {
    EXPECT_NEAR(activations(2, way) / activations(8, way), 4, 0.4)
        << to_string(way);
  }
}

TEST(ContextWay, ChoosesTheFastestOfThoseThatFitTheHeads) {
  const auto cluster = cluster::find_cluster("h100-sxm:8x8");
  const ModelShape model = find_model("llama3-8b");
  const auto chosen = [&](Strategy strategy) {
    const auto choice = choose_context_way(model, strategy, cluster);
    strategy.context = choice.options;
    const double least = estimate_step(model, strategy, cluster).step_seconds;
    for (const ContextParallelOptions& other :
         std::array<ContextParallelOptions, 5>{
             ContextParallelOptions{ContextWay::ring},
             {ContextWay::all_gather},
             {ContextWay::ulysses},
             {ContextWay::ulysses_ring, 2},
             {ContextWay::ulysses_ring, 8}}) {
      const int64_t cp = strategy.layout.cp;
      const int64_t ranks = head_ranks(other, cp);
      if (ranks > 32 / strategy.layout.tp || cp % ranks != 0) continue;
      strategy.context = other;
      EXPECT_LE(
          least, 1.011 * estimate_step(model, strategy, cluster).step_seconds)
          << choice.why << " against " << to_string(other.way);
    }
    return choice;
  };
  const auto in_a_node = chosen(cut(8));
  EXPECT_EQ(in_a_node.options.way, ContextWay::ulysses);
  EXPECT_THAT(in_a_node.why, StartsWith("ulysses: "));
  EXPECT_THAT(in_a_node.why, HasSubstr("32,768 tokens"));
  EXPECT_THAT(in_a_node.why, HasSubstr("; ring "));
  Strategy across = cut(8);
  across.layout.tp = 8;  // 4 heads
  const auto across_nodes = chosen(across);
  EXPECT_EQ(across_nodes.options.way, ContextWay::ring);
  EXPECT_THAT(across_nodes.why, StartsWith("ring: "));
  EXPECT_THAT(across_nodes.why, HasSubstr("; all_gather "));
  Strategy brief = cut(8);
  brief.seq_len = 2048;
  EXPECT_NE(chosen(brief).options.way, ContextWay::automatic);
  Strategy many = cut(32);
  many.layout.tp = 2;  // 16 heads
  const auto grouped = chosen(many);
  EXPECT_THAT(grouped.why, Not(HasSubstr("ulysses ")));
  EXPECT_THAT(grouped.why, HasSubstr("ulysses_ring of 8"));
}

TEST(ContextWay, KeepsWhatIsSet) {
  const auto cluster = cluster::find_cluster("h100-sxm:8");
  const auto kept = choose_context_way(
      find_model("llama3-8b"), cut(8, {ContextWay::all_gather}), cluster);
  EXPECT_EQ(kept.options.way, ContextWay::all_gather);
  EXPECT_EQ(kept.why, "");
  const auto grouped = choose_context_way(
      find_model("llama3-8b"), cut(8, {ContextWay::ulysses_ring}), cluster);
  EXPECT_EQ(grouped.options.way, ContextWay::ulysses_ring);
  EXPECT_GT(grouped.options.ulysses, 1);
}

}  // namespace echelon::cost::context_way_test
