#include <gmock/gmock.h>

#include <string>

#include "echelon/report/collectives.h"
#include "echelon/report/report.h"
#include "tests/report/page_text.h"
#include "tests/report/sample_run.h"
#include "tests/report/sample_tensor.h"

namespace echelon::report::tensor_section_test {

using sample::contains;
using sample::expect_no_parts;
using sample::expect_parts;
using testing::DoubleNear;
using testing::ElementsAre;
using testing::IsEmpty;

std::string names(const std::vector<ShardedMatrix>& matrices) {
  std::string text;
  for (const auto& m : matrices) {
    text += m.name + (m.sharded_by == ShardedBy::columns ? "|" : "-") +
            std::to_string(m.inputs) + "x" + std::to_string(m.outputs) + " ";
  }
  return text;
}

TEST(ShardedBlocks, OfAGptAreFewAndSayHowEachMatrixIsSharded) {
  const auto blocks =
      sharded_blocks(sample::gpt_shards({.ranks = 2, .layers = 24}));
  ASSERT_EQ(blocks.size(), 5u);
  EXPECT_EQ(blocks[0].regions[0].rows[0].sharded_by, ShardedBy::vocabulary);
  EXPECT_EQ(blocks[0].regions[0].rows[0].outputs, 768);
  EXPECT_THAT(blocks[1].regions, IsEmpty());
  EXPECT_EQ(blocks[2].layers.size(), 24u);
  ASSERT_EQ(blocks[2].regions.size(), 2u);
  // [in, out], told by the biases: c_proj is square.
  EXPECT_EQ(blocks[2].regions[0].name, "attn");
  EXPECT_EQ(names(blocks[2].regions[0].columns), "attn.c_attn|768x2304 ");
  EXPECT_EQ(names(blocks[2].regions[0].rows), "attn.c_proj-768x768 ");
  EXPECT_EQ(names(blocks[2].regions[1].columns), "mlp.c_fc|768x3072 ");
  EXPECT_EQ(names(blocks[2].regions[1].rows), "mlp.c_proj-3072x768 ");
  EXPECT_THAT(
      blocks[2].sharded_vectors,
      ElementsAre("attn.c_attn.bias", "mlp.c_fc.bias"));
  EXPECT_EQ(blocks[2].replicated.size(), 6u);
  EXPECT_EQ(names(blocks[4].regions[0].columns), "|768x50257 ");
}

TEST(ShardedBlocks, OfALlamaHaveThreeMatricesOfOneInput) {
  const auto blocks = sharded_blocks(sample::llama_shards(
      {.ranks = 4,
       .layers = 3,
       .hidden = 512,
       .heads = 8,
       .kv_heads = 2,
       .intermediate = 1000}));
  const auto& layer = blocks[1];
  EXPECT_EQ(
      names(layer.regions[0].columns),
      "self_attn.q_proj|512x512 self_attn.k_proj|512x128 "
      "self_attn.v_proj|512x128 ");
  EXPECT_EQ(names(layer.regions[0].rows), "self_attn.o_proj-512x512 ");
  EXPECT_EQ(names(layer.regions[1].rows), "mlp.down_proj-1000x512 ");
  // Two heads of keys on four ranks: each lies on two.
  EXPECT_EQ(
      layer.regions[0].columns[1].pieces[1],
      layer.regions[0].columns[1].pieces[0]);
}

TEST(ShardedBlocks, OfConvolutionsAreByChannels) {
  const auto blocks = sharded_blocks(sample::cnn_shards(3));
  EXPECT_EQ(names(blocks[0].regions[0].columns), "|3x16 ");
  EXPECT_THAT(blocks[0].regions[0].columns[0].kernel, ElementsAre(3, 3));
  EXPECT_EQ(names(blocks[1].regions[0].rows), "-16x32 ");
  EXPECT_EQ(names(blocks[2].regions[0].rows), "-8192x10 ");
}

TEST(ShardedBlocks, CountTiedParametersOnce) {
  auto model = sample::gpt_shards({.ranks = 2, .layers = 1});
  const auto held = held_shares(model);
  EXPECT_THAT(held[0] + held[1], DoubleNear(1.02, 0.01));
  model.layers.back().parameters[0].tied = false;
  EXPECT_LT(held_shares(model)[0], held[0]);
}

// One rank, one step: a forward with a call that it waits for, and a backward
// with one that it hides half of.
timeline::Timeline two_calls() {
  timeline::Timeline timeline{
      .title = "", .rank_names = {"rank 0"}, .spans = {}};
  const auto span = [&](const char* track, const char* name,
                        timeline::SpanKind kind, int64_t begin, int64_t end,
                        int64_t bytes, const char* axis) {
    timeline.spans.push_back(
        {0, track, name, kind, begin, end, 3, bytes, axis});
  };
  using enum timeline::SpanKind;
  span("compute", "forward", forward, 0, 1000, 0, "");
  span("comm", "all_reduce h.0.mlp sum", communication, 400, 600, 64, "tp");
  span("compute", "wait", communication, 400, 600, 0, "");
  span("compute", "backward", backward, 1000, 3000, 0, "");
  span(
      "comm", "all_reduce h.0.mlp input gradient", communication, 1100, 1500,
      32, "tp");
  span(
      "comm", "all_reduce h.1.mlp input gradient", communication, 2600, 3000,
      32, "tp");
  span("compute", "wait", communication, 2800, 3000, 0, "");
  span("comm", "send_recv 0F3", communication, 1000, 1100, 8, "pp");
  return timeline;
}

TEST(Collectives, KnowTheirPassAndWhatIsHidden) {
  const auto timeline = two_calls();
  const auto costs = collective_costs(timeline, timeline::diagnose(timeline));
  ASSERT_EQ(costs.size(), 4u);
  EXPECT_EQ(costs[0].axis, "pp");
  EXPECT_EQ(costs[1].label, "h.0.mlp input gradient");
  EXPECT_EQ(costs[1].pass, "backward");
  EXPECT_DOUBLE_EQ(costs[1].seconds, 400e-9);
  EXPECT_DOUBLE_EQ(costs[1].hidden_seconds, 400e-9);
  EXPECT_EQ(costs[2].pass, "forward");
  EXPECT_DOUBLE_EQ(costs[2].bytes, 64);
  EXPECT_DOUBLE_EQ(costs[2].hidden_seconds, 0);
  EXPECT_DOUBLE_EQ(costs[3].hidden_seconds, 200e-9);
}

TEST(Collectives, AreMeansOverStepsAndTheRanksThatMakeThem) {
  auto timeline = two_calls();
  const size_t one_step = timeline.spans.size();
  for (size_t i = 0; i < one_step; ++i) {
    timeline::Span next = timeline.spans[i];
    next.step = 4;
    next.begin_ns += 5000;
    next.end_ns += 5000;
    next.bytes *= 3;
    timeline.spans.push_back(next);
    next.rank = 1;
    next.bytes *= 2;
    if (next.axis != "pp") timeline.spans.push_back(next);
  }
  const auto costs = collective_costs(timeline, timeline::diagnose(timeline));
  EXPECT_DOUBLE_EQ(costs[0].bytes, 16);               // rank 0: 8 and 24
  EXPECT_DOUBLE_EQ(costs[2].bytes, (128 + 384) / 2);  // rank 1 has one step
  EXPECT_DOUBLE_EQ(costs[2].calls, 1);
}

TEST(Collectives, OfAPipelineAreCountedOnceForARank) {
  timeline::Timeline timeline;
  for (const int32_t rank : {0, 1}) {
    timeline.spans.push_back(
        {rank, "compute", "forward", timeline::SpanKind::forward, 0, 1000, 3});
    for (const char* microbatch : {"0", "1"}) {
      timeline.spans.push_back(
          {rank, "comm",
           std::string("recv ") + (rank == 0 ? "1B" : "0F") + microbatch,
           timeline::SpanKind::communication, 100, 200, 3, 1024, "pp"});
    }
  }
  const auto html = to_html(sample::with_timeline(timeline));
  expect_parts(
      html, {"A step of a rank makes 2 calls on pp (2 KiB, 200 ns,",
             "those of an axis over all ranks"});
}

TEST(Collectives, ThatDifferInNumbersAloneArePutTogether) {
  const auto timeline = two_calls();
  auto costs =
      put_together(collective_costs(timeline, timeline::diagnose(timeline)));
  ASSERT_EQ(costs.size(), 3u);
  EXPECT_EQ(costs[0].label, "h.0\u20131.mlp input gradient");
  EXPECT_DOUBLE_EQ(costs[0].calls, 2);
  EXPECT_DOUBLE_EQ(costs[0].seconds, 800e-9);
  EXPECT_EQ(costs[1].label, "h.0.mlp sum");
  EXPECT_EQ(costs[2].label, "activations of stage 0");
  // A number within a word is part of a name.
  costs = put_together(
      {{.axis = "tp",
        .operation = "all_reduce",
        .label = "conv1 sum",
        .pass = ""},
       {.axis = "tp",
        .operation = "all_reduce",
        .label = "conv2 sum",
        .pass = ""}});
  EXPECT_EQ(costs.size(), 2u);
}

TEST(TensorSection, SaysWhatEachCollectiveTook) {
  const auto html = to_html(sample::tensor_run(sample::gpt_shards({})));
  expect_parts(
      html, {"How the layers are sharded",
             "transformer.h.0 \u2026 transformer.h.11", "all sharded alike",
             "each rank: 768 \u00d7 1,152", "rank 1: 25,128 \u00d7 768"});
  // The costs are those of one layer and step, at both of its ends.
  expect_parts(
      html,
      {"<b>all-reduce</b> of the sums<span class=\"shard-cost\">140 \u00b5s, "
       "3 MiB</span>",
       "<b>all-reduce</b> of X\u2019s gradient<span class=\"shard-cost\">"
       "150 \u00b5s, 3 MiB</span>"});
  EXPECT_FALSE(contains(html, "<b>reduce-scatter</b>"));
  expect_parts(html, {"tp: pieces of a layer", "dp: replicas of the model"});
}

TEST(TensorSection, HasOtherCollectivesWhereTokensAreSharded) {
  const auto html = to_html(sample::tensor_run(
      sample::llama_shards(
          {.ranks = 3,
           .hidden = 384,
           .heads = 6,
           .kv_heads = 2,
           .shards_tokens = true}),
      "self_attn"));
  expect_parts(
      html,
      {"<b>all-gather</b> of the tokens<span class=\"shard-cost\">90 \u00b5s",
       "<b>all-gather, reduce-scatter</b> of the tokens again, of X\u2019s "
       "gradient<span class=\"shard-cost\">240 \u00b5s",
       "<b>reduce-scatter</b> of the sums<span class=\"shard-cost\">140 "
       "\u00b5s",
       "tokens sharded", "some parts on several ranks"});
  EXPECT_FALSE(contains(html, "<b>all-reduce</b> of the sums"));
}

TEST(TensorSection, KnowsThatOutputsStaySharded) {
  const auto html = to_html(sample::tensor_run(sample::cnn_shards(3)));
  expect_parts(html, {"nothing: X is data", "nothing: Y stays sharded"});
  EXPECT_TRUE(contains(html, "each rank takes its part"));  // into fc
  EXPECT_TRUE(contains(html, "by input channels"));
}

TEST(TensorSection, IsNotThereForAModelThatIsWhole) {
  auto input = sample::tensor_run(sample::gpt_shards({}));
  input.tensor.ranks = 1;
  EXPECT_FALSE(contains(to_html(input), "How the layers are sharded"));
  input.tensor = {};
  input.timeline = {};
  const auto html = to_html(input);
  expect_no_parts(html, {"How the layers are sharded", "Collectives"});
}

TEST(TensorSection, StaysSmall) {
  auto model = sample::gpt_shards({.ranks = 64, .layers = 96, .heads = 96});
  // Layers that all differ.
  for (size_t i = 0; i < model.layers.size(); ++i) {
    for (auto& p : model.layers[i].parameters) {
      for (auto& part : p.parts) part.shape[0] += static_cast<int64_t>(i);
    }
  }
  auto input = sample::tensor_run(model);
  EXPECT_LT(to_html(input).size(), 500'000u);
}

}  // namespace echelon::report::tensor_section_test
