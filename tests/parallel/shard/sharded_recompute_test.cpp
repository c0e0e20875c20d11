// Sharded parameters together with what changes how backward runs: activation
// recompute, offloaded activations, and backwards in two halves (pipelines).
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "echelon/memory/activation_storage.h"
#include "echelon/memory/recompute.h"
#include "echelon/parallel/pipeline/stage_graph.h"
#include "echelon/parallel/shard/fully_sharded.h"
#include "tests/parallel/shard/training.h"

namespace echelon::sharded_recompute_test {

using namespace sharding_test;

// No in-place changes: recompute does not allow them.
LayerList plain_list() {
  LayerList list;
  for (const int i : {1, 2, 3, 4}) {
    const std::string name = "fc" + std::to_string(i);
    nets::add_linear(list, name, i == 1 ? 6 : 4 + i, 5 + i);
    list.add_function("act" + std::to_string(i), [](const Tensor& x) {
      return torch::tanh(x);
    });
  }
  return list;
}

class Around : public testing::TestWithParam<int> {
 protected:
  void expect_parity(const std::function<Forward(Forward)>& around) {
    for (const auto& list : {nets::tied(), nets::conv()}) {
      Plan plan = with_stage(GetParam());
      plan.list = list;
      plan.around = around;
      plan.microbatches = 2;
      plan.evaluate = true;
      for (const int ranks : {1, 2, 3}) {
        sharding_test::expect_parity({ranks}, plan);
      }
      plan.options.unshard_once = true;
      sharding_test::expect_parity({2}, plan);
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Stage, Around, testing::Values(1, 2, 3));

TEST_P(Around, RecomputedLayers) {
  expect_parity([](Forward forward) { return recomputed(forward); });
}

TEST_P(Around, RecomputeExceptMatmuls) {
  expect_parity([](Forward forward) {
    return recomputed(forward, {.keep = matmul_operators()});
  });
}

TEST_P(Around, OffloadedActivations) {
  expect_parity([](Forward forward) {
    return with_hooks(
        recomputed(forward),
        offload_to_host([](const Tensor&) { return false; }, 1));
  });
}

// A step with recompute all-gathers as often as one without.
TEST(Recompute, AddsNoAllGathers) {
  Ranks{2}.run([&](World& world) {
    Plan plan = with_stage(3);
    plan.list = plain_list();
    plan.around = [](Forward forward) { return recomputed(forward); };
    plan.options.shard.prefetch = 0;
    ShardedNet sharded(world, plan);
    forward_backward(sharded, plan, world, 0);
    auto counts = labels_since(world, 0);
    for (const char* name : {"fc1", "fc2", "fc3"}) {
      EXPECT_EQ(counts["gather " + std::string(name)], 2) << name;
    }
    EXPECT_EQ(counts["gather fc4"], 1);
  });
}

// Several units in one recomputed region: a node of backward reads one unit
// while the region is recomputed.
TEST(Recompute, OfARegionWithSeveralUnits) {
  Plan plan = with_stage(3);
  plan.list = plain_list();
  const auto expected = on_one_device(plan);
  Ranks{2}.run([&](World& world) {
    ShardedNet sharded(world, plan);
    const auto layers = sharded.forwards;
    sharded.forwards = {recomputed([layers](const Tensors& inputs) {
      Tensors tensors = inputs;
      for (const auto& layer : layers) tensors = layer(tensors);
      return tensors;
    })};
    forward_backward(sharded, plan, world, 0);
    expect_parts(
        "gradient of", expected.gradients[0], sharded.units, world.group(),
        Which::gradients, kTolerance);
  });
}

struct TwoLayersImpl : torch::nn::Module {
  TwoLayersImpl() {
    a = register_module("a", torch::nn::Linear(6, 8));
    b = register_module("b", torch::nn::Linear(8, 4));
    parity::give_values(*this, 3);
  }
  Tensor forward(const Tensor& x, bool again) {
    const auto run = [this](const Tensors& inputs) -> Tensors {
      return {b(torch::tanh(a(inputs[0])))};
    };
    return again ? recomputed(run)({x})[0] : run({x})[0];
  }
  torch::nn::Linear a{nullptr}, b{nullptr};
};
TORCH_MODULE(TwoLayers);

TEST(Recompute, InsideAnyModule) {
  TwoLayers plain;
  const Tensor x = parity::random({5, 6}, 1);
  plain->forward(x, false).square().sum().backward();
  const auto gradients = parity::gradients_of(*plain);
  for (const int stage : {1, 2, 3}) {
    Ranks{2}.run([&](World& world) {
      TwoLayers net;
      FullyShardedOptions options{.shard = world.group(), .units = {"a", "b"}};
      options.sharding.shard.stage = stage;
      options.sharding.shard.prefetch = 0;
      FullyShardedDataParallel<TwoLayersImpl> sharded(net.ptr(), options);
      sharded(x, true).square().sum().backward();
      expect_parts(
          "gradient of", gradients, sharded.units(), world.group(),
          Which::gradients, kTolerance);
    });
  }
}

// Two pipeline stages on one rank, whose backwards run in two halves: the first
// halves of both microbatches before the second ones.
class Halves : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stage, Halves, testing::Values(1, 2, 3));

TEST_P(Halves, OfTwoStages) {
  Plan plan = with_stage(GetParam());
  plan.microbatches = 2;
  const auto expected = on_one_device(plan);
  constexpr size_t kFirstLayer = 4;  // of stage 1; its units are 2 to 5
  for (const int ranks : {1, 2, 3}) {
    Ranks{ranks}.run([&](World& world) {
      ShardedNet sharded(world, plan);
      const std::vector<std::vector<size_t>> units = {{0, 1}, {2, 3, 4, 5}};
      std::vector<std::vector<pipeline::StageGraph>> graphs(2);
      std::vector<Tensor> losses;
      for (int m = 0; m < 2; ++m) {
        const Tensor x = own_rows_of(plan, world, 0, m);
        Tensors tensors = {x};
        for (size_t stage = 0; stage < 2; ++stage) {
          pipeline::StageGraph graph;
          if (stage == 1) {
            tensors = {tensors[0].detach().requires_grad_()};
            tensors = graph.track(tensors, pipeline::shape_of(tensors, "test"));
          }
          const size_t from = stage == 0 ? 0 : kFirstLayer;
          const size_t to = stage == 0 ? kFirstLayer : sharded.forwards.size();
          for (size_t i = from; i < to; ++i) {
            tensors = sharded.forwards[i](tensors);
          }
          if (stage == 1) {
            tensors = {
                loss_sum(tensors, x) * static_cast<double>(world.size()) /
                static_cast<double>(2 * plan.rows)};
          }
          graph.set_outputs(tensors);
          graphs[stage].push_back(std::move(graph));
        }
      }
      std::vector<Tensors> between;
      for (int m = 0; m < 2; ++m) {
        between.push_back(
            graphs[1][m].backward_input({torch::ones({}, torch::kFloat64)}));
      }
      for (int m = 0; m < 2; ++m) {
        sharded.units.begin_backward({.last = m == 1, .units = units[1]});
        graphs[1][m].backward_weight();
        sharded.units.begin_backward({.last = m == 1, .units = units[0]});
        graphs[0][m].backward(between[m]);
      }
      sharded.units.finish();
      expect_parts(
          "gradient of", expected.gradients[0], sharded.units, world.group(),
          Which::gradients, kTolerance);
      // Backward of a stage reduces only its own units.
      const auto counts = labels_since(world, 0, "reduce ");
      EXPECT_EQ(counts.size(), ranks == 1 ? 0U : 6U);
      for (const auto& [label, count] : counts) {
        EXPECT_EQ(count, GetParam() == 1 ? 1 : 2) << label;
      }
    });
  }
}

}  // namespace echelon::sharded_recompute_test
