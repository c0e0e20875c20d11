// The layers of a transformer on the meta device, where costs are counted.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "echelon/counting/layer_cost.h"
#include "echelon/parallel/tensor/attention.h"
#include "echelon/parallel/tensor/dropout.h"
#include "echelon/parallel/tensor/mlp.h"
#include "tests/parallel/tensor/parts.h"

namespace echelon::count_test {

using torch::Tensor;

constexpr int64_t kBatch = 2;
constexpr int64_t kSequence = 8;
constexpr int64_t kHidden = 48;

template <class Options>
std::vector<counting::LayerCost>
count(const Options& options, const TensorParallel& parallel) {
  const AttentionFrame frame{.batch = kBatch, .sequence = kSequence};
  const int64_t tokens = kBatch * kSequence;
  LayerList layers;
  layers.add(
      "attn",
      [=] {
        return std::make_shared<ParallelAttention>(options, parallel, "attn");
      },
      [=](ParallelAttention& layer, const Tensor& x, const Tensor& documents,
          const Tensor& keys) {
        auto with_mask = frame;
        with_mask.mask = document_mask(documents, x.scalar_type());
        with_mask.keys = keys;
        return std::make_tuple(layer.forward(x, with_mask), keys);
      });
  const MlpShape shape{kHidden, 96, options.fused};
  const auto dropped = [=](const Tensor& x, const Tensor& keys) {
    return dropout(
        x, keys, {options.dropout, 1},
        place_of_tokens(parallel, kBatch, kSequence));
  };
  if (options.fused) {
    layers.add(
        "mlp",
        [=] { return std::make_shared<GeluMlp>(shape, parallel, "mlp"); },
        [=](GeluMlp& layer, const Tensor& x, const Tensor& keys) {
          return dropped(layer.forward(x, tokens), keys);
        });
  } else {
    layers.add(
        "mlp",
        [=] { return std::make_shared<GatedMlp>(shape, parallel, "mlp"); },
        [=](GatedMlp& layer, const Tensor& x, const Tensor& keys) {
          return dropped(layer.forward(x, tokens), keys);
        });
  }
  const auto x =
      parallel.splits_tokens()
          ? std::vector<int64_t>{parallel.part_of(tokens).size(), kHidden}
          : std::vector<int64_t>{kBatch, kSequence, kHidden};
  return counting::count_layers(
      layers, {{x, torch::kFloat32},
               {{kBatch, kSequence}, torch::kInt64},
               {{kBatch}, torch::kInt64}});
}

class Count : public testing::TestWithParam<double> {};
INSTANTIATE_TEST_SUITE_P(Dropout, Count, testing::Values(0.0, 0.1));

// Every rank has an even part of the products; their sum is one device's.
TEST_P(Count, RanksShareTheWork) {
  const AttentionOptions gpt{
      .shape = {.hidden = kHidden, .heads = 12}, .dropout = GetParam()};
  const AttentionOptions llama{
      .shape = {.hidden = kHidden, .heads = 12, .kv_heads = 6},
      .fused = false,
      .bias = false,
      .rotary = RotaryOptions{},
      .dropout = GetParam()};
  for (const auto& options : {gpt, llama}) {
    const auto whole = count(options, {});
    EXPECT_GT(whole[0].forward_flops, 0);
    EXPECT_GT(whole[0].backward_flops, whole[0].forward_flops);
    for (const bool cut : {false, true}) {
      SCOPED_TRACE(cut);
      parity::on_ranks({3, {cut}}, [&](const TensorParallel& parallel) {
        const auto mine = count(options, parallel);
        for (size_t i = 0; i < whole.size(); ++i) {
          EXPECT_DOUBLE_EQ(mine[i].flops() * 3, whole[i].flops());
        }
      });
    }
  }
}

}  // namespace echelon::count_test
