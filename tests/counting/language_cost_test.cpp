// The costs of the layers of gpt and llama, compared with formulas.
#include <gtest/gtest.h>

#include "echelon/architecture/language_model.h"
#include "echelon/comm/world.h"
#include "echelon/counting/layer_cost.h"
#include "echelon/models/make_network.h"

namespace echelon::counting::language_cost_test {

constexpr double kBatch = 4;
constexpr double kSequence = 64;

ModelOptions options_of(const std::string& name) {
  ModelOptions options;
  options.name = name;
  options.layers = 2;
  options.hidden_size = 96;
  options.heads = 6;
  options.kv_heads = name == "llama" ? 2 : 0;
  options.intermediate_size = 250;
  options.max_positions = 64;
  options.vocab_size = 1000;
  return options;
}

std::vector<LayerCost> costs_of(
    const ModelOptions& options, const TensorParallel& parallel = {},
    bool documents = false) {
  const TensorSpec tokens{
      {static_cast<int64_t>(kBatch), static_cast<int64_t>(kSequence)},
      torch::kInt64};
  std::vector<TensorSpec> inputs = {tokens};
  if (documents) inputs.push_back(tokens);
  return count_layers(
      model_layers(options, {static_cast<int64_t>(kSequence)}, 1000, parallel),
      inputs);
}

// Multiplications by weights in one block for one token.
double weights_of_block(const ModelOptions& options) {
  const auto shape = language_model_shape(options, 1000);
  const double hidden = static_cast<double>(shape.hidden_size);
  const double kv = static_cast<double>(shape.kv_heads * shape.head_size);
  const double inner = static_cast<double>(shape.intermediate_size);
  const double matrices = options.name == "gpt" ? 2 : 3;
  return 2 * hidden * hidden + 2 * hidden * kv + matrices * hidden * inner;
}

TEST(LanguageCost, EqualsTheFormula) {
  for (const char* name : {"gpt", "llama"}) {
    const auto options = options_of(name);
    const auto costs = costs_of(options);
    ASSERT_EQ(costs.size(), list_layers(options).size());
    // 2 flops per weight and token; as many for the gradient of the weights,
    // and for that of the inputs. Scores and their product with values take 2 *
    // 2 per pair of tokens and feature, and 2 * 5 in backward.
    const double linear = 2 * kBatch * kSequence * weights_of_block(options);
    const double pairs = kBatch * kSequence * kSequence * 96;
    int64_t blocks = 0;
    for (const auto& cost : costs) {
      const bool block = cost.name.ends_with(".0") || cost.name.ends_with(".1");
      if (block) {
        ++blocks;
        EXPECT_EQ(cost.forward_flops, linear + 4 * pairs) << cost.name;
        // Matrix-vector products in the norms of llama.
        const double backward = 2 * linear + 10 * pairs;
        EXPECT_NEAR(cost.backward_flops, backward, 1e-3 * backward)
            << cost.name;
      } else if (cost.name == "lm_head") {
        const double head = 2 * kBatch * kSequence * 96 * 1000;
        EXPECT_EQ(cost.forward_flops, head);
        EXPECT_EQ(cost.backward_flops, 2 * head);
      } else {
        EXPECT_EQ(cost.forward_flops, 0) << cost.name;
        EXPECT_LE(cost.backward_flops, 1e-3 * linear) << cost.name;
      }
    }
    EXPECT_EQ(blocks, 2);
    const auto list = list_parameters(options, {64}, 1000);
    int64_t elements = 0;
    for (const auto& info : list) elements += info.num_elements();
    int64_t counted = 0;
    for (const auto& cost : costs) counted += cost.parameters;
    EXPECT_EQ(counted, elements) << name;
  }
}

// Documents add a mask and no flops; a sharded layer has its share of them.
TEST(LanguageCost, WithDocumentsAndOnEachRank) {
  for (const char* name : {"gpt", "llama"}) {
    const auto options = options_of(name);
    const auto whole = costs_of(options);
    const auto with_documents = costs_of(options, {}, true);
    for (size_t i = 0; i < whole.size(); ++i) {
      EXPECT_EQ(whole[i].flops(), with_documents[i].flops()) << whole[i].name;
    }
    for (const bool cut_tokens : {false, true}) {
      run_ranks(2, [&](World& world) {
        const auto part = costs_of(
            options, {world.group(), {.sequence_parallel = cut_tokens}});
        for (size_t i = 0; i < whole.size(); ++i) {
          const double half = whole[i].forward_flops / 2;
          EXPECT_EQ(part[i].forward_flops, half) << whole[i].name;
        }
      });
    }
  }
}

TEST(LanguageCost, ALargeModelNeedsNoMemory) {
  const ModelOptions options{.name = "llama-70b"};
  const auto costs = count_layers(
      model_layers(options, {4096}, vocabulary(options, 0)),
      {{{8, 4096}, torch::kInt64}});
  int64_t parameters = 0;
  for (const auto& cost : costs) parameters += cost.parameters;
  EXPECT_EQ(parameters, 70553706496);
}

}  // namespace echelon::counting::language_cost_test
