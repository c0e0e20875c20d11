#include "echelon/cost/layer_work.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "echelon/cost/memory_estimate.h"
#include "echelon/cost/model_catalogue.h"

namespace echelon::cost::layer_work_test {

double elements(const std::vector<LayerWork>& layers) {
  double sum = 0;
  for (const LayerWork& layer : layers) {
    sum += static_cast<double>(layer.repeat) * layer.parameters;
  }
  return sum;
}

Strategy pipeline(int64_t pp, const char* schedule) {
  return {
      .layout = {.pp = pp},
      .global_batch = 16,
      .schedule = schedule_kind(schedule)};
}

std::vector<LayerWork>
layers_of(const ModelShape& model, const Strategy& strategy) {
  return layer_work(model, strategy, find_framework("echelon"));
}

double
sum_of_attention(const Operations& operations, double Operation::*figure) {
  double sum = 0;
  for (const Operation& one : operations) {
    if (one.kind == OperationKind::attention) sum += one.*figure;
  }
  return sum;
}

// Of a sample, without padding.
double logits_of(const ModelShape& model) {
  return 1024.0 * static_cast<double>(model.transformer->vocab);
}

// Rows of gpt2's embedding beside its 50257, to a multiple of 128.
constexpr double kPadded = (50304 - 50257) * 768;
constexpr double kEmbedding = 50304.0 * 768;

TEST(LayerWork, ATiedHeadIsTheEmbeddingWhereOneRankHasBoth) {
  const ModelShape gpt2 = find_model("gpt2");
  const Framework& framework = find_framework("echelon");
  const double all = gpt2.num_parameters() + kPadded;
  for (const auto& [pp, schedule, copy] :
       {std::tuple(1, "1f1b", false), std::tuple(4, "1f1b", true),
        std::tuple(4, "zb-v", false)}) {
    const Strategy strategy = pipeline(pp, schedule);
    EXPECT_NEAR(
        elements(layer_work(gpt2, strategy, framework)),
        all + (copy ? kEmbedding : 0), 1)
        << pp << schedule;
    EXPECT_EQ(
        copied_embedding(*gpt2.transformer, strategy, framework),
        copy ? kEmbedding : 0);
  }
}

TEST(LayerWork, WhatIsNotTiedIsNoCopy) {
  const ModelShape llama = find_model("llama2-7b");
  const Strategy strategy = pipeline(4, "1f1b");
  const Framework& framework = find_framework("echelon");
  EXPECT_EQ(copied_embedding(*llama.transformer, strategy, framework), 0);
  EXPECT_NEAR(elements(layers_of(llama, strategy)), llama.num_parameters(), 1);
}

// In 16 bits our kernels read each logit once, and again in backward, which
// writes a gradient (kernels/vocab_loss.h). Others, and float32, move more.
TEST(LayerWork, TheLossOf16BitsMovesEachLogitThreeTimes) {
  const ModelShape gpt2 = find_model("gpt2");
  Strategy strategy = pipeline(1, "1f1b");
  const double logits = 1024.0 * 50304;
  const auto moved = [&](const char* framework) {
    const LayerWork head =
        layer_work(gpt2, strategy, find_framework(framework)).back();
    double sum = 0;
    for (const auto* pass : {&head.forward, &head.backward_input}) {
      for (const Operation& one : *pass) {
        if (one.name == "loss") sum += one.bytes;
      }
    }
    return sum / logits;
  };
  EXPECT_EQ(moved("echelon"), 2 + 4);
  EXPECT_EQ(moved("fsdp"), 20 + 10);
  const auto held = [&] {
    return head_bytes(gpt2, strategy, find_framework("echelon"));
  };
  const double hidden = 1024.0 * 768;
  EXPECT_EQ(held().kept, 2 * logits_of(gpt2) + 2 * 2 * hidden);
  EXPECT_EQ(held().working, 2 * logits_of(gpt2) + 2 * hidden);
  strategy.precision = cluster::Precision::fp32;
  EXPECT_EQ(moved("echelon"), 20 + 10);
  EXPECT_EQ(held().kept, 4 * logits_of(gpt2) + 2 * 4 * hidden);
}

// 4 h d L^2 forwards, half of it behind a causal mask; 2.5 times that
// backwards.
TEST(LayerWork, AttentionComputesWhatTheMaskLeaves) {
  ModelShape gpt2 = find_model("gpt2");
  Strategy strategy = pipeline(1, "1f1b");
  const double all = 4.0 * 768 * 1024 * 1024;
  for (const bool causal : {true, false}) {
    gpt2.transformer->causal = causal;
    const LayerWork block = layers_of(gpt2, strategy)[1];
    const double forward = all * (causal ? 0.5 : 1);
    EXPECT_EQ(sum_of_attention(block.forward, &Operation::flops), forward);
    EXPECT_EQ(
        sum_of_attention(block.backward_input, &Operation::flops),
        2.5 * forward);
  }
}

// Queries and the result of all heads; keys and values of theirs.
TEST(LayerWork, FusedAttentionMovesItsInputsAndItsResult) {
  const ModelShape llama = find_model("llama3-8b");
  const LayerWork block = layers_of(llama, pipeline(1, "1f1b"))[1];
  const double bytes = 2.0 * 8192 * (2 * 4096 + 2 * 1024);
  EXPECT_EQ(sum_of_attention(block.forward, &Operation::bytes), bytes);
  EXPECT_EQ(
      sum_of_attention(block.backward_input, &Operation::bytes), 2 * bytes);
}

TEST(LayerWork, CountedLayersComputeWhatTheModelDoes) {
  const ModelShape resnet = find_model("resnet50");
  Strategy strategy = pipeline(1, "1f1b");
  strategy.microbatch_size = 3;
  double flops = 0;
  for (const LayerWork& layer : layers_of(resnet, strategy)) {
    for (const auto* pass :
         {&layer.forward, &layer.backward_input, &layer.backward_weight}) {
      for (const Operation& one : *pass) flops += one.flops;
    }
  }
  const double all = 3 * resnet.model_flops(0, false);
  EXPECT_NEAR(flops, all, 1e-6 * all);
}

// Counted for two samples, asked for eight: four times the side that samples
// are on.
TEST(LayerWork, CountedOperatorsGrowWithTheSamples) {
  const CountedOperator product{
      .name = "mm",
      .product = cluster::ProductKind::product,
      .count = 1,
      .m = 32,
      .n = 5,
      .k = 7};
  CountedOperator weight = product, many = product;
  weight.for_weight = true;
  many.count = 6;
  ModelShape model;
  model.layers = {
      {.name = "fc",
       .counted_samples = 2,
       .forward = {product, many},
       .backward = {product, weight}}};
  Strategy strategy = pipeline(1, "1f1b");
  strategy.microbatch_size = 8;
  const LayerWork work = layers_of(model, strategy)[0];
  EXPECT_EQ(work.forward[0].m, 128);
  EXPECT_EQ(work.forward[0].flops, 2.0 * 128 * 5 * 7);
  EXPECT_EQ(work.forward[1].count, 24);
  EXPECT_EQ(work.forward[1].m, 32);
  EXPECT_EQ(work.forward[1].flops, 24 * 2.0 * 32 * 5 * 7);
  EXPECT_EQ(work.backward_input[0].m, 128);
  EXPECT_EQ(work.backward_weight[0].k, 28);
  EXPECT_EQ(work.backward_weight[0].m, 32);
}

// Gradients are as large whatever the samples, and the first microbatch adds
// none.
TEST(LayerWork, CountedGradientsAddUpOverMicrobatches) {
  ModelShape model;
  model.layers = {
      {.name = "fc",
       .counted_samples = 2,
       .forward = {{.name = "relu", .bytes = 100}},
       .backward = {
           {.name = "relu", .bytes = 100},
           {.name = "add",
            .bytes = 1200,
            .for_weight = true,
            .accumulates = true}}}};
  Strategy strategy = pipeline(1, "1f1b");
  strategy.microbatch_size = 4;
  for (const int64_t microbatches : {1, 2, 4}) {
    strategy.global_batch = 4 * microbatches;
    const LayerWork work = layers_of(model, strategy)[0];
    ASSERT_EQ(work.backward_weight.size(), microbatches == 1 ? 0u : 1u);
    if (microbatches == 1) continue;
    EXPECT_EQ(work.backward_weight[0].bytes, 1200);
    EXPECT_EQ(work.backward_weight[0].times, microbatches == 2 ? 0.5 : 0.75);
    // Since the gradients were last added to, the operators of 4 samples have
    // moved their bytes, and all sums theirs.
    EXPECT_EQ(work.backward_weight[0].bytes_since, 1600);
    EXPECT_EQ(work.backward_input[0].bytes_since, 0);
    // The node is in the graph in any case, so that starting it takes as long
    // as in a forward.
    EXPECT_FALSE(work.backward_weight[0].backward);
    EXPECT_TRUE(work.backward_input[0].backward);
    // The average that operators move is a matter of the other operators.
    EXPECT_EQ(work.forward[0].bytes_beside, 200);
  }
}

TEST(LayerWork, OnlySoManyLayersOfAStageComputeAgain) {
  Strategy strategy = pipeline(3, "1f1b");
  strategy.recompute = Recompute::all;
  for (const int64_t most : {0, 1, 3, 9}) {
    strategy.recompute_layers = most;
    const auto stages =
        stage_work(layers_of(find_model("gpt2"), strategy), strategy);
    for (const auto& stage : stages) {
      int64_t again = 0, blocks = 0;
      for (const LayerWork& layer : stage) {
        if (layer.name != "block") continue;
        blocks += layer.repeat;
        if (!layer.again.empty()) again += layer.repeat;
      }
      EXPECT_EQ(blocks, 4);
      EXPECT_EQ(again, std::min<int64_t>(most, 4));
    }
  }
}

}  // namespace echelon::cost::layer_work_test
