// Training with layers that are cut over ranks.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "echelon/comm/world.h"
#include "echelon/models/layer_cost.h"
#include "echelon/parallel/tensor/linear.h"

namespace echelon {
namespace {

// Two matrices, cut by outputs and by inputs.
LayerList block(const TensorParallel& parallel) {
  LayerList layers;
  layers.add("up", [=] {
    return std::make_shared<ColumnParallelLinear>(
        LinearShape{.in = 6, .out = 9}, parallel, "up");
  }, [](ColumnParallelLinear& up, torch::Tensor x) {
    return up.forward(x, 20);
  });
  layers.add("down", [=] {
    return std::make_shared<RowParallelLinear>(
        LinearShape{.in = 9, .out = 6}, parallel, "down");
  });
  return layers;
}

// One rank alone counts what it holds of layers that all ranks compute.
TEST(CountLayers, AsksNoOtherRank) {
  run_ranks(2, [](World& world) {
    if (world.rank() == 1) return;
    TensorParallel parallel{world.group(), {}};
    auto costs = count_layers(block(parallel), {{{20, 6}}});
    EXPECT_EQ(costs[0].parameters, 5 * 6 + 5);
    EXPECT_EQ(costs[1].parameters, 6 * 5 + 6);
    EXPECT_DOUBLE_EQ(costs[0].forward_flops, 2.0 * 20 * 6 * 5);
    EXPECT_EQ(costs[1].outputs[0].shape, (std::vector<int64_t>{20, 6}));

    parallel.options.sequence_parallel = true;
    costs = count_layers(block(parallel), {{{10, 6}}});
    EXPECT_EQ(costs[0].outputs[0].shape, (std::vector<int64_t>{20, 5}));
    EXPECT_EQ(costs[1].outputs[0].shape, (std::vector<int64_t>{10, 6}));
    EXPECT_GT(costs[1].backward_flops, costs[1].forward_flops);
    EXPECT_EQ(world.history().count(), 0U);
  });
}

}  // namespace
}  // namespace echelon
