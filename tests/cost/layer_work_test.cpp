#include "echelon/cost/layer_work.h"

#include <gtest/gtest.h>

#include <numeric>

#include "echelon/cost/model_catalogue.h"
#include "echelon/cost/transformer_work.h"

namespace echelon {
namespace {

double elements(const std::vector<LayerWork>& layers) {
  double sum = 0;
  for (const LayerWork& layer : layers) {
    sum += static_cast<double>(layer.repeat) * layer.parameters;
  }
  return sum;
}

Strategy pipeline(int64_t pp, const char* schedule) {
  Strategy strategy;
  strategy.layout.pp = pp;
  strategy.schedule = schedule;
  strategy.global_batch = 16;
  return strategy;
}

// Rows of gpt2's embedding beside its 50257, to a multiple of 128.
constexpr double kPadded = (50304 - 50257) * 768;
constexpr double kEmbedding = 50304.0 * 768;

TEST(LayerWork, ATiedHeadIsTheEmbeddingWhereOneRankHasBoth) {
  const ModelShape gpt2 = find_model("gpt2");
  const Stack& stack = find_stack("echelon");
  const double all = gpt2.num_parameters() + kPadded;
  for (const auto& [pp, schedule, copy] :
       {std::tuple(1, "1f1b", false), std::tuple(4, "1f1b", true),
        std::tuple(4, "zb-v", false)}) {
    const Strategy strategy = pipeline(pp, schedule);
    EXPECT_NEAR(
        elements(layer_work(gpt2, strategy, stack)),
        all + (copy ? kEmbedding : 0), 1)
        << pp << schedule;
    EXPECT_EQ(
        copied_embedding(*gpt2.transformer, strategy, stack),
        copy ? kEmbedding : 0);
  }
}

TEST(LayerWork, WhatIsNotTiedIsNoCopy) {
  const ModelShape llama = find_model("llama2-7b");
  const Strategy strategy = pipeline(4, "1f1b");
  const Stack& stack = find_stack("echelon");
  EXPECT_EQ(copied_embedding(*llama.transformer, strategy, stack), 0);
  EXPECT_NEAR(
      elements(layer_work(llama, strategy, stack)), llama.num_parameters(), 1);
}

}  // namespace
}  // namespace echelon
