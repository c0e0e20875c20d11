// Options of ShardedUnits: what they change, and what they must not change.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <map>
#include <string>

#include "echelon/error.h"
#include "echelon/models/make_network.h"
#include "echelon/profiling/memory_meter.h"
#include "tests/parallel/shard/training.h"
#include "tests/support/error_text.h"

namespace echelon::sharded_options_test {

using namespace sharding_test;

// ------------------------------------------------------------------- parity

class Hybrid : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stage, Hybrid, testing::Values(1, 2, 3));

TEST_P(Hybrid, TwoReplicasOfTwoShards) {
  Plan plan = with_stage(GetParam());
  plan.replicate = 2;
  expect_parity({4}, plan);
  expect_parity({4, BackendKind::gloo}, plan);
  plan.microbatches = 2;
  expect_parity({4}, plan);
}

// Plain data parallelism, by the same engine.
TEST_P(Hybrid, ReplicasAlone) {
  Plan plan = with_stage(GetParam());
  plan.replicate = 3;
  plan.microbatches = 2;
  plan.list = nets::tied();
  expect_parity({3}, plan);
}

TEST_P(Hybrid, OffloadedOptimizer) {
  Plan plan = with_stage(GetParam());
  plan.options.offload_optimizer = true;
  plan.microbatches = 2;
  plan.evaluate = true;
  for (const int ranks : {1, 2, 3}) expect_parity({ranks}, plan);
  plan.replicate = 2;
  expect_parity({4}, plan);
}

TEST_P(Hybrid, OffloadedShards) {
  Plan plan = with_stage(GetParam());
  plan.options.offload_optimizer = true;
  plan.options.offload_shards = true;
  plan.microbatches = 2;
  for (const int ranks : {1, 2, 3}) expect_parity({ranks}, plan);
}

// Sums in another dtype than gradients have.
TEST_P(Hybrid, ReduceDtype) {
  Plan plan = with_stage(GetParam());
  plan.options.reduce = torch::kFloat32;
  plan.microbatches = 2;
  for (const int ranks : {1, 2, 3}) expect_parity({ranks}, plan, 1e-5);
  const auto expected = on_one_device(plan);
  Ranks{2}.run([&](World& world) {
    ShardedNet sharded(world, plan);
    forward_backward(sharded, plan, world, 0);
    int reductions = 0;
    for (const auto& record : world.history().snapshot()) {
      if (!record.label.starts_with("reduce ")) continue;
      EXPECT_EQ(record.dtype, "float32");
      ++reductions;
    }
    EXPECT_GT(reductions, 0);
    for (const auto& part : sharded.units.parts()) {
      EXPECT_EQ(part.gradient.scalar_type(), torch::kFloat64);
    }
  });
}

TEST(GatherOnce, KeepsParametersUntilTheStepEnds) {
  Plan plan = with_stage(3);
  plan.options.unshard_once = true;
  plan.microbatches = 3;
  plan.evaluate = true;
  plan.list = nets::tied();
  for (const int ranks : {1, 2, 3}) expect_parity({ranks}, plan);
}

TEST(Prefetch, OfAnyDepth) {
  for (const int64_t prefetch : {0, 1, 2, 100}) {
    Plan plan = with_stage(3);
    plan.options.shard.prefetch = prefetch;
    plan.microbatches = 2;
    plan.evaluate = true;
    expect_parity({2}, plan);
    plan.list = nets::tied();
    expect_parity({3}, plan);
  }
  Plan plan = with_stage(3);
  plan.options.shard.prefetch = 100;
  plan.options.shard.prefetch_bytes = 1000;
  expect_parity({2}, plan);
}

// CPUs register no memory. The ranks say so once, and train as ever.
TEST(RegisteredBuffers, AreOrdinaryOnesOnCpus) {
  Plan plan = with_stage(3);
  plan.options.shard.registered_buffers = true;
  testing::internal::CaptureStderr();
  for (int i = 0; i < 2; ++i) expect_parity({2}, plan);
  EXPECT_EQ(
      testing::internal::GetCapturedStderr(),
      "warning: [shard] registered_buffers has no effect: the backend "
      "\"local\" registers no memory; NCCL does\n");
}

// A language model whose token embedding is also its last layer's weight.
TEST(Models, GptWithTiedEmbeddings) {
  ModelOptions options;
  options.name = "gpt";
  options.layers = 2;
  options.hidden_size = 12;
  options.heads = 2;
  options.vocab_size = 19;
  options.max_positions = 5;
  for (const int stage : {1, 2, 3}) {
    Plan plan = with_stage(stage);
    plan.list = model_layers(options, {5}, 19);
    plan.microbatches = 2;
    plan.evaluate = true;
    plan.input = [&](int step, int microbatch) {
      return (torch::arange(plan.rows * 5).view({plan.rows, 5}) * 7 + step +
              3 * microbatch) %
             19;
    };
    for (const int ranks : {1, 2, 3}) expect_parity({ranks}, plan);
  }
}

// ------------------------------------------------------- unused parameters

// [rows, 6] -> [rows, 6]; the rows decide which parameters are used.
struct SometimesImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) {
    Tensor y = x.matmul(weight);
    const Tensor chosen = (x.select(1, 0) > 0.9).nonzero().flatten();
    if (chosen.numel() == 0) return y;
    return y.index_add(0, chosen, y.index_select(0, chosen) * rare);
  }
  Tensor weight = register_parameter("weight", parity::random({6, 6}, 3) * 0.4);
  Tensor rare = register_parameter("rare", parity::random({6}, 4));
  Tensor never = register_parameter("never", parity::random({5, 2}, 5));
};
TORCH_MODULE(Sometimes);

LayerList list_with_unused() {
  LayerList list;
  nets::add_linear(list, "in", 6, 6);
  list.add("some", [] { return Sometimes(); });
  list.add(
      "none", [] { return nets::with_values("none", torch::nn::Linear(3, 3)); },
      [](auto&, const Tensor& x) { return torch::tanh(x); });
  nets::add_linear(list, "out", 6, 4);
  return list;
}

TEST(UnusedParameters, OnSomeRanksOrOnAll) {
  for (const int stage : {1, 2, 3}) {
    Plan plan = with_stage(stage);
    plan.list = list_with_unused();
    plan.steps = 4;
    for (const bool all : {true, false}) {
      plan.microbatches = all ? 1 : 2;
      auto expected = on_one_device(plan);
      // Zeros, where another parameter of the unit has a gradient.
      for (auto& step : expected.gradients) step["some.never"] = Tensor();
      for (const int ranks : {2, 3, 4}) {
        SCOPED_TRACE(ranks);
        plan.optimizer = OptimizerKind::sgd;
        Ranks{ranks}.run([&](World& world) {
          ShardedNet sharded(world, plan);
          for (int step = 0; step < 2; ++step) {
            forward_backward(sharded, plan, world, 0);
            expect_parts(
                "gradient of", expected.gradients[0], sharded.units,
                world.group(), Which::gradients, kTolerance);
            for (const auto& part : sharded.units.parts()) {
              const bool unused = part.name.starts_with("none.");
              EXPECT_EQ(part.gradient.defined(), !unused) << part.name;
            }
            sharded.units.after_update(/*updated=*/false);
          }
        });
      }
    }
  }
}

// The optimizer does not touch a unit that the first steps do not use, and
// trains it once it is used.
TEST(UnusedParameters, UsedFromALaterStep) {
  for (const int stage : {1, 2, 3}) {
    Plan plan = with_stage(stage);
    auto step_now = std::make_shared<std::atomic<int>>(0);
    plan.list = LayerList();
    nets::add_linear(plan.list, "in", 6, 6);
    plan.list.add(
        "late",
        [] { return nets::with_values("late", torch::nn::Linear(6, 6)); },
        [step_now](auto& module, const Tensor& x) {
          return *step_now >= 2 ? module.forward(x) : x;
        });
    nets::add_linear(plan.list, "out", 6, 4);
    plan.steps = 5;
    plan.input = [step_now](int step, int) {
      *step_now = step;
      return Tensor();
    };
    expect_parity({1}, plan);
    // Each step ends with a collective, so all ranks are in the same step.
    expect_parity({3}, plan);
  }
}

// ------------------------------------------------------------- precision

TEST(LowPrecision, MasterCopiesKeepSmallUpdates) {
  for (const int stage : {1, 2, 3}) {
    for (const int ranks : {1, 2, 3}) {
      SCOPED_TRACE(ranks);
      Plan plan = with_stage(stage);
      plan.optimizer = OptimizerKind::sgd;
      plan.options.compute = torch::kBFloat16;
      plan.options.reduce = torch::kFloat32;
      Ranks{ranks}.run([&](World& world) {
        auto network = build(plan);
        network->to(torch::kFloat32);
        std::map<std::string, Tensor> before;
        for (const auto& item : network->named_parameters()) {
          before[item.key()] = item.value().detach().clone();
        }
        ShardedNet sharded(
            network, world.group(), Group::alone("dp_replicate"), plan);
        for (const auto& item : network->named_parameters()) {
          EXPECT_EQ(item.value().scalar_type(), torch::kBFloat16);
        }
        const auto x = rows_of(plan, 0, 0).to(torch::kBFloat16);
        for (int step = 0; step < 20; ++step) {
          sharded.forward({x})[0].to(torch::kFloat32).sum().backward();
          sharded.units.finish();
          const torch::NoGradGuard no_grad;
          for (const auto& shard : sharded.units.flat_shards()) {
            EXPECT_EQ(shard.tensor.scalar_type(), torch::kFloat32);
            EXPECT_EQ(shard.tensor.grad().scalar_type(), torch::kFloat32);
            // Less than the spacing of bfloat16 numbers of this size.
            Tensor value = shard.tensor.detach();
            value += value.abs() * 1e-4;
          }
          sharded.units.after_update();
        }
        for (const auto& part : sharded.units.parts()) {
          const Tensor old = before[part.name].flatten().slice(
              0, part.range.begin, part.range.end);
          const Tensor expected = old + old.abs() * 0.002;
          EXPECT_LE(
              parity::detail::largest(part.value - expected),
              1e-4 * std::max(parity::detail::largest(old), 1e-6))
              << part.name;
        }
        const auto gathered = sharded.units.unshard();
        for (const auto& item : network->named_parameters()) {
          const Tensor old = before[item.key()];
          EXPECT_LE(
              parity::detail::largest(
                  item.value().detach().to(torch::kFloat32) - old * 1.0),
              0.01 * parity::detail::largest(old));
        }
      });
    }
  }
}

// The gradients of a bf16 computation, on any number of ranks.
TEST(LowPrecision, FollowsFloat64) {
  Plan plan = with_stage(3);
  const auto expected = on_one_device(plan);
  plan.options.compute = torch::kBFloat16;
  plan.options.reduce = torch::kFloat32;
  plan.around = [](Forward forward) {
    return [forward](const Tensors& inputs) {
      return forward({inputs[0].to(torch::kBFloat16)});
    };
  };
  for (const int stage : {1, 2, 3}) {
    plan.options.shard.stage = stage;
    for (const int ranks : {1, 2, 3}) {
      Ranks{ranks}.run(
          [&](World& world) { expect_parity_on(world, plan, expected, 0.2); });
    }
  }
}

// ------------------------------------------------------- hooks and places

TEST(BeforeReduce, SeesUnshardedGradients) {
  for (const int stage : {1, 2, 3}) {
    Plan plan = with_stage(stage);
    plan.microbatches = 2;
    const auto expected = on_one_device(plan);
    Ranks{2}.run([&](World& world) {
      Plan mine = plan;
      std::map<std::string, int> seen;
      mine.options.before_reduce = [&](const Parameters& parameters) {
        for (const auto& [name, tensor] : parameters) {
          Tensor parameter = tensor;
          ASSERT_TRUE(parameter.grad().defined()) << name;
          EXPECT_EQ(parameter.grad().sizes(), parameter.sizes());
          // In place, or a tensor of its own.
          if (++seen[name] % 2 == 0) {
            parameter.mutable_grad().mul_(3);
          } else {
            parameter.mutable_grad() = parameter.grad() * 3;
          }
        }
      };
      ShardedNet sharded(world, mine);
      forward_backward(sharded, mine, world, 0);
      for (const auto& part : sharded.units.parts()) {
        EXPECT_EQ(seen[part.name], stage == 1 ? 1 : 2) << part.name;
        const Tensor whole = expected.gradients[0].at(part.name) * 3;
        expect_part(
            part.name, whole, part.gradient, part.range, 1e-3, kTolerance);
      }
      for (const auto& item : sharded.network->named_parameters()) {
        EXPECT_FALSE(item.value().grad().defined()) << item.key();
      }
    });
  }
}

// A parameter with a buffer of its own has the same range in every unit.
TEST(Apart, RangesDependOnTheShapeAlone) {
  Plan plan = with_stage(3);
  plan.options.own_buffer = {"fc2.weight", "fc4.weight"};
  expect_parity({3}, plan);
  Ranks{3}.run([&](World& world) {
    ShardedUnits units(
        world.group(), Group::alone("dp_replicate"),
        {.own_buffer = {"a.weight", "b.weight"}});
    const auto tensor = [](at::IntArrayRef shape) {
      return parity::random(shape, 1).requires_grad_();
    };
    const Tensor a = tensor({7, 11}), b = tensor({7, 11}), c = tensor({40, 3}),
                 d = tensor({5});
    units.add("a", {{"a.weight", a}, {"a.other", d}});
    units.add("b", {{"b.other", c}, {"b.weight", b}});
    const auto parts = units.parts();
    EXPECT_EQ(parts[0].name, "a.weight");
    EXPECT_EQ(parts[3].name, "b.weight");
    EXPECT_EQ(parts[0].range, parts[3].range);
    EXPECT_TRUE(torch::equal(parts[0].value, parts[3].value));
  });
}

TEST(Values, OfRankZeroReachAllRanks) {
  Ranks{4}.run([&](World& world) {
    const Plan plan = with_stage(3);
    const Groups groups(world, 2);
    auto network = build(plan);
    for (auto& parameter : network->parameters()) {
      const torch::NoGradGuard no_grad;
      parameter.add_(world.rank());
    }
    ShardedNet sharded(
        network, groups.shard, groups.replicate, plan, /*equal=*/false);
    const auto expected = build(plan);
    const auto gathered = sharded.units.unshard();
    for (const auto& item : expected->named_parameters()) {
      EXPECT_TRUE(
          torch::equal(item.value(), network->named_parameters()[item.key()]))
          << item.key();
    }
  });
}

TEST(AfterUpdate, OfASkippedStepOnlyDropsGradients) {
  for (const int stage : {1, 3}) {
    const Plan plan = with_stage(stage);
    const auto expected = on_one_device(plan);
    Ranks{2}.run([&](World& world) {
      ShardedNet sharded(world, plan);
      for (int round = 0; round < 3; ++round) {
        forward_backward(sharded, plan, world, 0);
        expect_parts(
            "gradient of", expected.gradients[0], sharded.units, world.group(),
            Which::gradients, kTolerance);
        const uint64_t from = world.history().count();
        sharded.units.after_update(/*updated=*/false);
        EXPECT_EQ(world.history().count(), from);
        for (const auto& shard : sharded.units.flat_shards()) {
          EXPECT_FALSE(shard.tensor.grad().defined());
        }
      }
    });
  }
}

// Parameters that stay unsharded are all-gathered before the next forward.
TEST(AfterUpdate, UnshardsWhatStaysUnsharded) {
  for (const int stage : {1, 2, 3}) {
    Plan plan = with_stage(stage);
    plan.prepare = [](Network& network) {
      network.named_parameters()["fc3.weight"].set_requires_grad(false);
    };
    Ranks{2}.run([&](World& world) {
      ShardedNet sharded(world, plan);
      forward_backward(sharded, plan, world, 0);
      const uint64_t from = world.history().count();
      sharded.units.after_update();
      Counts expected;
      if (stage < 3) {
        for (const char* name : {"fc1", "fc2", "fc3", "norm", "fc4", "fc5"}) {
          expected["gather " + std::string(name)] = 1;
        }
      }
      // A frozen parameter is not all-gathered again.
      EXPECT_EQ(labels_since(world, from), expected) << stage;
    });
  }
}

// Parameters that are held unsharded over an update get the new values.
TEST(AfterUpdate, RefreshesHeldParameters) {
  for (const int stage : {1, 3}) {
    const Plan plan = with_stage(stage);
    Ranks{2}.run([&](World& world) {
      ShardedNet sharded(world, plan);
      const auto gathered = sharded.units.unshard();
      const auto weight = sharded.network->named_parameters()["fc2.weight"];
      const Tensor before = weight.detach().clone();
      for (const auto& shard : sharded.units.flat_shards()) {
        const torch::NoGradGuard no_grad;
        shard.tensor.detach().mul_(2);
      }
      sharded.units.after_update();
      EXPECT_TRUE(torch::equal(weight, before * 2));
    });
  }
}

// ---------------------------------------------------------------- mistakes

Tensor weights(at::IntArrayRef shape) {
  return parity::random(shape, 1).requires_grad_();
}

TEST(Mistakes, AreNamed) {
  ShardedUnits units(Group::alone("dp_shard"), Group::alone("dp_replicate"));
  const Tensor first = weights({4, 4});
  units.add("one", {{"one.weight", first}});
  const auto error = [&](const Parameters& parameters) {
    return error_text<ConfigError>([&] { units.add("two", parameters); });
  };
  const Tensor base = torch::zeros({6, 6});
  EXPECT_THAT(
      error({{"two.weight", first}}), HasAll("two.weight", "unit \"one\""));
  EXPECT_THAT(
      error({{"two.ids", torch::zeros({3}, torch::kLong)}}),
      HasAll("two.ids", "Long"));
  EXPECT_THAT(
      error({{"two.a", base}, {"two.b", base.detach()}}),
      HasAll("two.b", "two.a"));
  EXPECT_THAT(
      error({{"two.view", base.narrow(0, 1, 2)}}), HasAll("two.view", "view"));
  EXPECT_THAT(
      error({{"two.sparse", torch::eye(3).to_sparse()}}),
      HasAll("two.sparse", "sparse"));
  EXPECT_EQ(units.size(), 1U);
  EXPECT_EQ(units.unit_of(first), 0U);
  EXPECT_EQ(units.unit_of(base), std::nullopt);
}

TEST(Mistakes, TooLittleHostMemoryIsNamed) {
  profiling::MemoryMeter meter;
  const auto counting = meter.count();
  ShardedUnits units(
      Group::alone("dp_shard"), Group::alone("dp_replicate"),
      {.offload_optimizer = true});
  const Tensor big = weights({200, 200});
  meter.limit(meter.now().total() + 200 * 200 * 8 + 1000);
  const std::string message = error_text([&] {
    units.add("big", {{"big.weight", big}});
  });
  meter.limit(0);
  EXPECT_THAT(message, HasAll("offload", "320000 bytes", "big"));
}

TEST(Mistakes, TwoBackwardsInOneRoundAreRefused) {
  Ranks{2}.run([&](World& world) {
    const Plan plan = with_stage(3);
    ShardedNet sharded(world, plan);
    const Tensor x = rows_of(plan, 0, 0);
    sharded.forward({x})[0].sum().backward();
    const std::string message = error_text<ConfigError>(
        [&] { sharded.forward({x})[0].sum().backward(); });
    EXPECT_THAT(message, HasAll("fc5", "begin_backward"));
  });
}

TEST(Mistakes, CreateGraphIsRefused) {
  Ranks{2}.run([&](World& world) {
    const Plan plan = with_stage(3);
    ShardedNet sharded(world, plan);
    const Tensor x = rows_of(plan, 0, 0).requires_grad_();
    const std::string message = error_text<ConfigError>([&] {
      torch::autograd::grad(
          {sharded.forward({x})[0].sum()}, {x}, {}, std::nullopt,
          /*create_graph=*/true);
    });
    EXPECT_THAT(message, HasAll("create_graph", "fc5"));
  });
}

}  // namespace echelon::sharded_options_test
