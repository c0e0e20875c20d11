#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <tuple>

#include "echelon/layers/parameter_owner.h"
#include "echelon/parallel/tensor/linear.h"
#include "echelon/parallel/tensor/vocab.h"
#include "echelon/profiling/operator_scope.h"
#include "tests/parallel/shard/training.h"

namespace echelon::sharded_units_test {

using namespace sharding_test;

class Stages : public testing::TestWithParam<std::tuple<int, Ranks>> {
 protected:
  Plan plan(const LayerList& list = nets::mlp()) const {
    Plan plan = with_stage(std::get<0>(GetParam()));
    plan.list = list;
    return plan;
  }
  void expect_parity(const Plan& plan) const {
    sharding_test::expect_parity(std::get<1>(GetParam()), plan);
  }
};
INSTANTIATE_TEST_SUITE_P(
    Parity, Stages,
    testing::Combine(
        testing::Values(1, 2, 3),
        testing::Values(
            Ranks{1}, Ranks{2}, Ranks{3}, Ranks{4}, Ranks{2, BackendKind::gloo},
            Ranks{3, BackendKind::gloo})),
    [](const auto& one) {
      return "stage_" + std::to_string(std::get<0>(one.param)) + "_" +
             testing::PrintToString(std::get<1>(one.param));
    });

TEST_P(Stages, Mlp) {
  expect_parity(plan());
}

TEST_P(Stages, Convolutions) {
  expect_parity(plan(nets::conv()));
}

TEST_P(Stages, SkipConnections) {
  expect_parity(plan(nets::skip()));
}

// One parameter that three layers use.
TEST_P(Stages, Tied) {
  Plan plan = this->plan(nets::tied());
  plan.evaluate = true;
  expect_parity(plan);
}

TEST_P(Stages, AdamW) {
  Plan plan = this->plan();
  plan.optimizer = OptimizerKind::adamw;
  expect_parity(plan);
}

TEST_P(Stages, Accumulation) {
  Plan plan = this->plan();
  plan.microbatches = 3;
  expect_parity(plan);
  plan.keep_unsharded = true;
  expect_parity(plan);
}

TEST_P(Stages, Frozen) {
  Plan plan = this->plan();
  plan.microbatches = 2;
  plan.prepare = [](Network& network) {
    size_t index = 0;
    for (auto& item : network.named_parameters()) {
      // A whole layer, and biases of others.
      const bool bias = item.key().ends_with("bias") && index % 3 == 0;
      if (item.key().starts_with("fc2.") || bias) {
        item.value().set_requires_grad(false);
      }
      ++index;
    }
  };
  expect_parity(plan);
}

// Layers that write gradients of weights into the flat buffer themselves: two
// that share an input and are one matrix, one that is used twice, one of the
// other layout, and a head whose ids are no multiple of kPaddedRows.
struct Pair : torch::nn::Module {
  Pair() {
    for (const char* name : {"a", "b"}) {
      layers.push_back(register_module(
          name, std::make_shared<ColumnParallelLinear>(
                    LinearShape{.in = 6, .out = 16}, TensorParallel(), name)));
    }
    parity::give_values(*this, nets::seed_of("pair"));
  }
  Tensor forward(const Tensor& x) {
    const auto all = ColumnParallelLinear::forward_joined(layers, x, 0, "pair");
    if (all.defined()) return all.tanh();
    return torch::cat({layers[0]->forward(x), layers[1]->forward(x)}, 1).tanh();
  }
  std::vector<std::shared_ptr<ColumnParallelLinear>> layers;
};

LayerList own_linears() {
  LayerList list;
  const auto add = [&](const std::string& name, const LinearShape& shape,
                       auto forward) {
    list.add(
        name,
        [=] {
          auto layer = std::make_shared<ColumnParallelLinear>(
              shape, TensorParallel(), name);
          parity::give_values(*layer, nets::seed_of(name));
          return layer;
        },
        [=](ColumnParallelLinear& layer, const Tensors& inputs) {
          return Tensors{forward(layer, inputs[0])};
        });
  };
  list.add(
      "pair", [] { return std::make_shared<Pair>(); },
      [](Pair& pair, const Tensors& inputs) {
        return Tensors{pair.forward(inputs[0])};
      });
  add("twice", {.in = 32, .out = 32}, [](auto& layer, const Tensor& x) {
    return layer.forward(layer.forward(x).tanh());
  });
  add("other", {.in = 32, .out = 8, .layout = WeightLayout::in_out},
      [](auto& layer, const Tensor& x) { return layer.forward(x).tanh(); });
  add("head", {.in = 8, .out = 7, .bias = false},
      [](auto& layer, const Tensor& x) {
        return vocab_logits(x, layer.weight, {}, x.size(0), "head");
      });
  return list;
}

TEST_P(Stages, GradientsAreWrittenInPlace) {
  Plan plan = this->plan(own_linears());
  expect_parity(plan);
  plan.options.padded = {"head.weight"};
  plan.optimizer = OptimizerKind::adamw;
  expect_parity(plan);
  plan.microbatches = 3;
  expect_parity(plan);
  plan.keep_unsharded = true;
  expect_parity(plan);
}

// The sizes of what is copied while it lives.
class Copies : public profiling::OperatorHandler {
 public:
  Copies() : scope_(*this) {}
  void run(profiling::OperatorCall& call) override {
    if (call.name() == "aten::copy_") {
      sizes.push_back(call.stack[call.first()].toTensor().sizes().vec());
    }
    call.run();
  }
  auto of(const Tensor& tensor) const {
    return std::count(sizes.begin(), sizes.end(), tensor.sizes().vec());
  }
  std::vector<std::vector<int64_t>> sizes;

 private:
  profiling::OperatorScope scope_;
};

TEST(ShardedGradients, AreCopiedOnlyWhereALayerDidNotWriteThem) {
  run_ranks(1, [](World& world) {
    Plan plan;
    plan.list = own_linears();
    plan.options.padded = {"head.weight"};
    ShardedNet sharded(world, plan);
    const auto all = sharded.network->named_parameters();
    for (const bool shared : {false, true}) {
      const Tensor x = own_rows_of(plan, world, 0, 0);
      const Tensor loss = loss_sum(sharded.forward({x}), x);
      const Copies copies;
      loss.backward();
      EXPECT_EQ(copies.of(all["pair.a.weight"]), shared ? 2 : 0);
      // It is the sum of two.
      EXPECT_EQ(copies.of(all["twice.weight"]), 1);
      EXPECT_EQ(copies.of(all["other.weight"]), 0);
      EXPECT_EQ(copies.of(all["head.weight"]), 0);
      EXPECT_EQ(copies.of(all["other.bias"]), 1);
      sharded.units.finish();
      sharded.units.after_update(false);
      sharded.units.share(all["pair.a.weight"]);
    }
  });
}

TEST(ShardedGradients, OfAutogradGradStayWithTheCaller) {
  run_ranks(1, [](World& world) {
    Plan plan;
    plan.list = own_linears();
    ShardedNet sharded(world, plan);
    const auto weight = sharded.network->named_parameters()["other.weight"];
    const Tensor x = own_rows_of(plan, world, 0, 0);
    const auto gradient = [&] {
      return torch::autograd::grad(
          {loss_sum(sharded.forward({x}), x)}, {weight})[0];
    };
    const auto first = gradient();
    const auto kept = first.clone();
    loss_sum(sharded.forward({2 * x}), x).backward();
    EXPECT_TRUE(torch::equal(first, kept));
    sharded.units.finish();
  });
}

// A hook of the user's changes the gradient after the layer has written it.
TEST(ShardedGradients, AHookOfTheUsersDecides) {
  run_ranks(1, [](World& world) {
    Plan plan;
    plan.list = own_linears();
    ShardedNet plain(world, plan), hooked(world, plan);
    hooked.network->named_parameters()["other.weight"].register_hook(
        [](const Tensor& gradient) { return 3 * gradient; });
    std::map<std::string, Tensor> gradients;
    for (auto* sharded : {&plain, &hooked}) {
      const Tensor x = own_rows_of(plan, world, 0, 0);
      loss_sum(sharded->forward({x}), x).backward();
      sharded->units.finish();
      for (const auto& part : sharded->units.parts()) {
        auto& expected = gradients[part.name];
        if (sharded == &plain) {
          expected = part.gradient.clone();
        } else {
          const double factor = part.name == "other.weight" ? 3 : 1;
          EXPECT_TRUE(torch::equal(factor * expected, part.gradient))
              << part.name;
        }
      }
    }
  });
}

// What is behind the rows of a padded matrix is zero in every step, and no part
// has it.
TEST(ShardedGradients, PaddedRowsStayZero) {
  run_ranks(2, [](World& world) {
    for (const int stage : {1, 2, 3}) {
      Plan plan = with_stage(stage);
      plan.list = own_linears();
      plan.options.padded = {"head.weight"};
      plan.optimizer = OptimizerKind::adamw;
      ShardedNet sharded(world, plan);
      auto optimizer = sharded.optimizer(plan);
      const auto weight = sharded.network->named_parameters()["head.weight"];
      for (int step = 0; step < 3; ++step) {
        forward_backward(sharded, plan, world, step);
        optimizer->step();
        sharded.units.after_update();
        const auto pin = sharded.units.unshard();
        const auto owner = parameter_owner_of(weight);
        ASSERT_NE(owner, nullptr);
        const auto padded = owner->with_zero_rows(weight);
        ASSERT_EQ(padded.sizes(), (std::vector<int64_t>{kPaddedRows, 8}));
        EXPECT_TRUE(torch::equal(padded.narrow(0, 0, 7), weight));
        EXPECT_EQ(
            padded.narrow(0, 7, kPaddedRows - 7)
                .count_nonzero()
                .item<int64_t>(),
            0);
      }
      int64_t elements = 0;
      for (const auto& part : sharded.units.parts()) {
        if (part.name == "head.weight") elements += part.range.size();
      }
      auto sum = torch::tensor({elements});
      world.group().all_reduce(sum, ReduceOp::sum);
      EXPECT_EQ(sum.item<int64_t>(), 7 * 8);
    }
  });
}

}  // namespace echelon::sharded_units_test
