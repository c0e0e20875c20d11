#include "echelon/cost/step_operators.h"

#include <gmock/gmock.h>

#include "echelon/cluster/catalogue.h"
#include "echelon/cost/layer_work.h"
#include "echelon/cost/step_estimate.h"
#include "tests/support/error_text.h"

namespace echelon::cost::step_operators_test {

using cluster::ProductKind;
using testing::HasSubstr;

CountedOperator product(int64_t m, int64_t n, int64_t k) {
  return {
      .name = "mm",
      .product = ProductKind::product,
      .count = 1,
      .m = m,
      .n = n,
      .k = k};
}

CountedOperator attention(bool causal) {
  return {
      .name = "attention",
      .product = ProductKind::attention,
      .count = 64,
      .m = 4096,
      .n = 4096,
      .k = 128,
      .causal = causal};
}

// Two layers of one of two ranks that compute them together, on GPUs.
ModelShape counted(bool causal = true) {
  ModelShape model{.name = "counted", .layer_ranks = 2};
  for (int i = 0; i < 2; ++i) {
    CountedLayer layer{
        .name = "layer " + std::to_string(i),
        .forward_flops = 1e12,
        .backward_flops = 2e12,
        .parameters = 1e6,
        .output_elements = 1e6,
        .counted_samples = 1};
    layer.forward = {
        product(8192, 4096, 4096),
        attention(causal),
        {.name = "view", .launches = 0},
        {.name = "gelu", .bytes = 1e9},
        {.name = "relu", .bytes = 1e3},
        {.name = "all_reduce",
         .bytes = 1e8,
         .collective = CollectiveKind::all_reduce}};
    layer.backward = {product(8192, 4096, 4096), {.name = "add", .bytes = 1e9}};
    model.layers.push_back(layer);
  }
  return model;
}

Strategy strategy_of(const std::string& layout) {
  Strategy strategy;
  strategy.layout = parse_layout(layout);
  strategy.global_batch = 8;
  strategy.microbatch_size = 1;
  strategy.precision = cluster::Precision::bf16;
  strategy.framework = "echelon";
  return strategy;
}

const StepOperator&
find(const StepOperators& all, const std::string& name, bool backward) {
  for (const StepOperator& one : all.operators) {
    if (one.name == name && one.backward == backward) return one;
  }
  throw std::runtime_error("no operator " + name);
}

TEST(StepOperators, AreAsManyAndAsLongAsTheLayersHave) {
  const auto cluster = cluster::find_cluster("h100-sxm:8");
  const Strategy strategy = strategy_of("tp=2");
  const StepOperators all = step_operators(counted(), strategy, cluster);
  // Two layers, eight microbatches.
  EXPECT_EQ(all.views, 2 * 8);
  EXPECT_EQ(all.kernels, 2 * 8 * (5 + 2));
  const StepOperator& mm = find(all, "mm", false);
  EXPECT_EQ(mm.calls, 2 * 8);
  EXPECT_EQ(mm.shape, "[8192,4096]x[4096,4096]");
  EXPECT_EQ(mm.bound, Bound::products);
  // 275 GFLOP at no more than 989 TFLOP/s.
  EXPECT_GT(mm.seconds, 16 * 275e9 / 989e12);
  EXPECT_LT(mm.seconds, 16 * 275e9 / 500e12);
  EXPECT_EQ(find(all, "gelu", false).bound, Bound::memory);
  EXPECT_EQ(find(all, "relu", false).bound, Bound::launches);
  EXPECT_EQ(find(all, "all_reduce", false).bound, Bound::collectives);
  double sum = 0;
  for (size_t i = 0; i < all.operators.size(); ++i) {
    sum += all.operators[i].seconds;
    if (i > 0) {
      EXPECT_LE(all.operators[i].seconds, all.operators[i - 1].seconds);
    }
  }
  EXPECT_DOUBLE_EQ(all.seconds, sum);
  EXPECT_DOUBLE_EQ(
      sum, all.seconds_of(Bound::products) + all.seconds_of(Bound::memory) +
               all.seconds_of(Bound::launches) +
               all.seconds_of(Bound::collectives));
  // The step consists of them, of what the device waits, and of what follows.
  const StepEstimate step = estimate_step(counted(), strategy, cluster);
  const auto tp = step.parts.exposed[index_of(Axis::tp)];
  EXPECT_NEAR(
      sum + all.waits, step.parts.matrix + step.parts.memory + tp, 1e-9);
}

TEST(StepOperators, CausalAttentionTakesHalf) {
  const auto cluster = cluster::find_cluster("h100-sxm:8");
  const Strategy strategy = strategy_of("tp=2");
  const double half =
      find(step_operators(counted(true), strategy, cluster), "attention", false)
          .seconds;
  const double full =
      find(
          step_operators(counted(false), strategy, cluster), "attention", false)
          .seconds;
  EXPECT_NEAR(full / half, 2, 0.1);
  // The model's FLOPs are those of all ranks, and fewer with a mask.
  const double pairs = 2.0 * 64 * 2 * 2 * 4096.0 * 4096 * 128;
  EXPECT_DOUBLE_EQ(counted(false).model_flops(0, false), 2 * 2 * 3e12);
  EXPECT_DOUBLE_EQ(
      counted(true).model_flops(0, true) - counted(true).model_flops(0, false),
      2 * pairs / 2);
}

TEST(StepOperators, RecomputationCountsAsBackward) {
  const auto cluster = cluster::find_cluster("h100-sxm:8");
  Strategy strategy = strategy_of("tp=2");
  strategy.recompute = Recompute::all;
  const StepOperators all = step_operators(counted(), strategy, cluster);
  EXPECT_EQ(find(all, "gelu", true).calls, find(all, "gelu", false).calls);
  EXPECT_EQ(find(all, "mm", true).calls, 2 * find(all, "mm", false).calls);
}

TEST(StepOperators, OfTheStageThatTakesLongest) {
  const auto cluster = cluster::find_cluster("h100-sxm:8");
  ModelShape model = counted();
  model.layers[0].stage = 0;
  model.layers[1].stage = 1;
  model.layers[1].forward.push_back({.name = "slow", .bytes = 5e9});
  const StepOperators all =
      step_operators(model, strategy_of("pp=2,tp=2"), cluster);
  EXPECT_EQ(find(all, "slow", false).calls, 8);
  EXPECT_EQ(find(all, "gelu", false).calls, 8);
}

TEST(StepOperators, LayersOfOtherRanksAreRefused) {
  const auto cluster = cluster::find_cluster("h100-sxm:8");
  EXPECT_THAT(
      error_text(
          [&] { estimate_step(counted(), strategy_of("tp=4"), cluster); }),
      HasSubstr("tp=4, but the layers were counted for tp=2"));
}

TEST(StepOperators, SurviveTheFileOfCountedLayers) {
  const ModelShape model = counted();
  const ModelShape again =
      parse_counted_model(counted_model_json(model), "layers.json");
  EXPECT_EQ(again.layers, model.layers);
  EXPECT_EQ(again.layer_ranks, 2);
  for (const auto& [before, after, said] :
       std::vector<std::array<std::string, 3>>{
           {"\"collective\": \"all_reduce\"", "\"collective\": \"sum\"",
            "there is no collective \"sum\""},
           {"\"axis\": \"tp\"", "\"axis\": \"up\"", "there is no axis \"up\""},
           {"\"layer_ranks\": 2", "\"layer_ranks\": 0", "must be 1 or more"}}) {
    std::string text = counted_model_json(model);
    const size_t at = text.find(before);
    ASSERT_NE(at, text.npos) << text.substr(0, 2000);
    text.replace(at, before.size(), after);
    EXPECT_THAT(
        error_text([&] { parse_counted_model(text, "layers.json"); }),
        HasSubstr(said));
  }
}

}  // namespace echelon::cost::step_operators_test
