// Sharded layers in a user's list are initialised as slices of whole layers.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "echelon/layers/network.h"
#include "echelon/parallel/tensor/attention.h"
#include "echelon/parallel/tensor/norm.h"
#include "echelon/parallel/tensor/vocab.h"
#include "tests/parallel/tensor/parts.h"

namespace echelon::parameter_init_test {

LayerList layers_of(const TensorParallel& parallel) {
  LayerList layers;
  layers.add("embed", [parallel] {
    return std::make_shared<VocabParallelEmbedding>(11, 6, parallel, "embed");
  });
  layers.add("block.in", [parallel] {
    return std::make_shared<ColumnParallelLinear>(
        LinearShape{.in = 6, .out = 13, .layout = WeightLayout::in_out},
        parallel, "block.in");
  });
  layers.add("block.out", [parallel] {
    return std::make_shared<RowParallelLinear>(
        LinearShape{.in = 13, .out = 6}, parallel, "block.out");
  });
  layers.add(
      "attention",
      [parallel] {
        return std::make_shared<ParallelAttention>(
            AttentionOptions{
                .shape = {.hidden = 12, .heads = 6, .kv_heads = 2},
                .fused = true},
            parallel, "attention");
      },
      [](ParallelAttention&, const torch::Tensor& x) { return x; });
  layers.add("norm", [parallel] {
    return std::make_shared<LayerNorm>(6, 1e-5, parallel);
  });
  return layers;
}

TEST(ParameterInit, OfShardedLayersIsASliceOfTheWhole) {
  const auto list = layers_of({});
  const auto whole = build_network(list, 0, list.size(), 7)->named_parameters();
  for (const auto& item : whole) {
    ASSERT_TRUE(at::isfinite(item.value()).all().item<bool>()) << item.key();
  }
  EXPECT_NEAR(whole["embed.weight"].std().item<double>(), 1, 0.3);
  EXPECT_LE(
      whole["block.in.weight"].abs().max().item<double>(), 1 / std::sqrt(6.0));
  EXPECT_GT(whole["block.in.weight"].abs().max().item<double>(), 0.3);
  EXPECT_TRUE(whole["norm.weight"].equal(torch::ones({6})));
  EXPECT_FALSE(build_network(list, 0, list.size(), 8)
                   ->named_parameters()["block.in.weight"]
                   .equal(whole["block.in.weight"]));
  for (const int ranks : {2, 3, 4}) {
    parity::on_ranks({ranks, {}}, [&](const TensorParallel& parallel) {
      const auto cut = layers_of(parallel);
      const auto network = build_network(cut, 0, cut.size(), 7);
      const auto shards = shards_of(*network);
      EXPECT_EQ(shards.size(), whole.size());
      for (const auto& item : network->named_parameters()) {
        EXPECT_TRUE(item.value().equal(
            slice_of(whole[item.key()], shards.at(item.key()).shard)))
            << item.key() << " on rank " << parallel.rank();
      }
    });
  }
}

}  // namespace echelon::parameter_init_test
