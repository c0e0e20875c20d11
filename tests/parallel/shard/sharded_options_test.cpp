// What the options of ShardedUnits change, and what they must not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "echelon/error.h"
#include "echelon/models/make_network.h"
#include "echelon/profiling/memory_meter.h"
#include "tests/parallel/shard/training.h"

namespace echelon {
namespace sharded_options_test {

using namespace sharding_test;
using testing::AllOf;
using testing::HasSubstr;

// How many collectives of each label began since `from`.
using Counts = std::map<std::string, int>;

std::vector<CollectiveRecord> records_since(const World& world, uint64_t from) {
  const auto all = world.history().snapshot();
  return {
      all.end() - static_cast<std::ptrdiff_t>(world.history().count() - from),
      all.end()};
}

Counts labels_since(const World& world, uint64_t from) {
  Counts counts;
  for (const auto& record : records_since(world, from)) {
    if (!record.label.empty()) ++counts[record.label];
  }
  return counts;
}

// The labels of a step after the first, on rank 0.
Counts labels_of_step(int ranks, const Plan& plan) {
  Counts counts;
  std::mutex mutex;
  Ranks{ranks}.run([&](World& world) {
    const Groups groups(world, plan.replicate);
    Cut cut(build(plan), groups.shard, groups.replicate, plan);
    auto optimizer = cut.optimizer(plan);
    uint64_t from = 0;
    for (int step = 0; step < 2; ++step) {
      if (step == 1) from = world.history().count();
      forward_backward(cut, plan, world, step);
      optimizer->step();
      cut.units.after_update();
    }
    const std::lock_guard lock(mutex);
    if (world.rank() == 0) counts = labels_since(world, from);
  });
  return counts;
}

template <class E = ConfigError>
std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  }
  return "nothing was thrown";
}

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

// Plain data parallelism, with the same engine.
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
    Cut cut(build(plan), world.group(), Group::alone("dp_replicate"), plan);
    forward_backward(cut, plan, world, 0);
    int reductions = 0;
    for (const auto& record : world.history().snapshot()) {
      if (!record.label.starts_with("reduce ")) continue;
      EXPECT_EQ(record.dtype, "float32");
      ++reductions;
    }
    EXPECT_GT(reductions, 0);
    for (const auto& part : cut.units.parts()) {
      EXPECT_EQ(part.gradient.scalar_type(), torch::kFloat64);
    }
  });
}

TEST(Gather, UntilTheStepEnds) {
  Plan plan = with_stage(3);
  plan.options.gather_once = true;
  plan.microbatches = 3;
  plan.evaluate = true;
  plan.list = nets::tied();
  for (const int ranks : {1, 2, 3}) expect_parity({ranks}, plan);
}

TEST(Gather, AnyDepthAhead) {
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

// A language model, whose matrix of words is used by the first layer and the
// last.
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

// [rows, 6] -> [rows, 6]; what is used depends on the rows.
struct SometimesImpl : torch::nn::Module {
  SometimesImpl() {
    weight = register_parameter("weight", parity::random({6, 6}, 3) * 0.4);
    rare = register_parameter("rare", parity::random({6}, 4));
    never = register_parameter("never", parity::random({5, 2}, 5));
  }
  Tensor forward(const Tensor& x) {
    Tensor y = x.matmul(weight);
    const Tensor chosen = (x.select(1, 0) > 0.9).nonzero().flatten();
    if (chosen.numel() == 0) return y;
    return y.index_add(0, chosen, y.index_select(0, chosen) * rare);
  }
  Tensor weight, rare, never;
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

TEST(Unused, OnSomeRanksOrOnAll) {
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
        plan.optimizer = "sgd";
        Ranks{ranks}.run([&](World& world) {
          Cut cut(build(plan), world.group(), Group::alone("dp"), plan);
          for (int step = 0; step < 2; ++step) {
            forward_backward(cut, plan, world, 0);
            expect_parts(
                "gradient of", expected.gradients[0], cut.units, world.group(),
                Which::gradients, kTolerance);
            for (const auto& part : cut.units.parts()) {
              const bool unused = part.name.starts_with("none.");
              EXPECT_EQ(part.gradient.defined(), !unused) << part.name;
            }
            cut.units.after_update(/*updated=*/false);
          }
        });
      }
    }
  }
}

// A unit that the first steps do not use is not touched by the optimizer, and
// is trained once it is used.
TEST(Unused, FromAStepOn) {
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
    // Ranks are in one step together: each ends with a collective.
    expect_parity({3}, plan);
  }
}

// ------------------------------------------------------------ collectives

TEST(Collectives, OfAStep) {
  // 6 units in order: fc1 fc2 fc3 norm fc4 fc5.
  Plan plan = with_stage(3);
  plan.options.shard.prefetch = 0;
  auto counts = labels_of_step(2, plan);
  for (const char* name : {"fc2", "fc3", "norm", "fc4"}) {
    EXPECT_EQ(counts["gather " + std::string(name)], 2) << name;
    EXPECT_EQ(counts["reduce " + std::string(name)], 1) << name;
  }
  // Backward does not read it: the input wants no gradient.
  EXPECT_EQ(counts["gather fc1"], 1);
  EXPECT_EQ(counts["reduce fc1"], 1);
  // It stays from forward to backward.
  EXPECT_EQ(counts["gather fc5"], 1);
  EXPECT_EQ(counts["reduce fc5"], 1);
  EXPECT_EQ(counts["used units"], 0);

  plan.options.shard.prefetch = 1;
  counts = labels_of_step(2, plan);
  EXPECT_EQ(counts["gather fc3"], 2);
  EXPECT_EQ(counts["gather fc4"], 1);
  EXPECT_EQ(counts["gather fc5"], 1);

  plan.options.gather_once = true;
  counts = labels_of_step(2, plan);
  for (const char* name : {"fc1", "fc2", "fc3", "norm", "fc4", "fc5"}) {
    EXPECT_EQ(counts["gather " + std::string(name)], 1) << name;
  }

  plan = with_stage(2);
  plan.microbatches = 3;
  counts = labels_of_step(2, plan);
  EXPECT_EQ(counts["gather fc1"], 1);
  EXPECT_EQ(counts["reduce fc1"], 3);
  EXPECT_EQ(counts["reduce fc5"], 3);

  plan.keep_whole = true;
  EXPECT_EQ(labels_of_step(2, plan)["reduce fc1"], 1);

  plan = with_stage(1);
  plan.microbatches = 3;
  counts = labels_of_step(2, plan);
  EXPECT_EQ(counts["gather fc1"], 1);
  EXPECT_EQ(counts["reduce fc1"], 1);

  plan.replicate = 2;
  counts = labels_of_step(4, plan);
  EXPECT_EQ(counts["reduce fc1"], 1);
  EXPECT_EQ(counts["replicate fc1"], 1);
}

// A rank alone sends nothing.
TEST(Collectives, NoneOnOneRank) {
  for (const int stage : {1, 2, 3}) {
    EXPECT_TRUE(labels_of_step(1, with_stage(stage)).empty());
  }
}

// The next unit is on its way while this one computes, in forward and backward.
TEST(Collectives, GatheredAhead) {
  const Plan plan = with_stage(3);
  Ranks{2}.run([&](World& world) {
    Cut cut(build(plan), world.group(), Group::alone("dp_replicate"), plan);
    const auto begun = [&] { return labels_since(world, 0); };
    // One layer at a time: fc1, act1, fc2.
    Tensors x = cut.forwards[0]({rows_of(plan, 0, 0)});
    EXPECT_EQ(begun()["gather fc2"], 1);
    EXPECT_EQ(begun()["gather fc3"], 0);
    x = cut.forwards[2](cut.forwards[1](x));
    EXPECT_EQ(begun()["gather fc3"], 1);
    EXPECT_EQ(begun()["gather norm"], 0);
    for (size_t i = 3; i < cut.forwards.size(); ++i) x = cut.forwards[i](x);
    x[0].sum().backward();
    cut.units.finish();
    // Reductions begin while backward gathers what comes next.
    std::map<std::string, size_t> last;
    const auto all = world.history().snapshot();
    for (size_t i = 0; i < all.size(); ++i) last[all[i].label] = i;
    EXPECT_LT(last.at("reduce fc5"), last.at("gather fc2"));
    EXPECT_LT(last.at("reduce fc5"), last.at("reduce fc4"));
    EXPECT_LT(last.at("gather fc2"), last.at("reduce fc3"));
  });
}

// Whatever the depth, as far as the bytes reach.
TEST(Collectives, GatheredAheadUpToALimit) {
  Plan plan = with_stage(3);
  plan.options.shard.prefetch = 100;
  Ranks{2}.run([&](World& world) {
    const auto gathers_of_fc1 = [&](int64_t prefetch_bytes) {
      Plan mine = plan;
      mine.options.shard.prefetch_bytes = prefetch_bytes;
      Cut cut(build(mine), world.group(), Group::alone("dp_replicate"), mine);
      const uint64_t from = world.history().count();
      cut.forwards[0]({rows_of(mine, 0, 0)});
      return labels_since(world, from).size();
    };
    int64_t next = 0, two = 0;  // bytes of fc2, and of fc3 as well
    {
      const Cut cut(
          build(plan), world.group(), Group::alone("dp_replicate"), plan);
      next = cut.units.bytes()[1].gathered;
      two = next + cut.units.bytes()[2].gathered;
    }
    EXPECT_EQ(gathers_of_fc1(0), 6U);  // no limit: all
    EXPECT_EQ(gathers_of_fc1(two), 3U);
    EXPECT_EQ(gathers_of_fc1(two - 1), 2U);
    EXPECT_EQ(gathers_of_fc1(next - 1), 1U);
  });
}

// Layers in another order than they were added, some twice: from the second
// step on nothing is gathered in vain.
TEST(Collectives, OrderIsLearned) {
  Plan plan = with_stage(3);
  plan.list = LayerList();
  for (int i = 0; i < 5; ++i) {
    nets::add_linear(plan.list, "fc" + std::to_string(i), 6, 6);
  }
  const std::vector<size_t> order = {3, 0, 4, 0, 1, 2};
  const auto gathers = [&](int64_t prefetch) {
    int count = 0;
    std::mutex mutex;
    plan.options.shard.prefetch = prefetch;
    Ranks{2}.run([&](World& world) {
      Cut cut(build(plan), world.group(), Group::alone("dp_replicate"), plan);
      uint64_t from = 0;
      for (int step = 0; step < 3; ++step) {
        from = world.history().count();
        Tensors x = {rows_of(plan, 0, 0)};
        for (const size_t layer : order) x = cut.forwards[layer](x);
        x[0].sum().backward();
        cut.units.finish();
        cut.units.after_update();
      }
      const std::lock_guard lock(mutex);
      if (world.rank() > 0) return;
      for (const auto& [label, times] : labels_since(world, from)) {
        if (label.starts_with("gather ")) count += times;
      }
    });
    return count;
  };
  // Forward: all. Backward: all but the last, and the first, whose weight
  // nobody reads.
  EXPECT_EQ(gathers(0), 6 + 4);
  // One is still there when backward comes to it; 0 stays while 4 is used.
  EXPECT_LE(gathers(1), 6 + 4);
}

// ------------------------------------------------------------- precision

TEST(LowPrecision, MastersKeepWhatBfloat16CannotHold) {
  for (const int stage : {1, 2, 3}) {
    for (const int ranks : {1, 2, 3}) {
      SCOPED_TRACE(ranks);
      Plan plan = with_stage(stage);
      plan.optimizer = "sgd";
      plan.options.compute = torch::kBFloat16;
      plan.options.reduce = torch::kFloat32;
      Ranks{ranks}.run([&](World& world) {
        auto network = build(plan);
        network->to(torch::kFloat32);
        std::map<std::string, Tensor> before;
        for (const auto& item : network->named_parameters()) {
          before[item.key()] = item.value().detach().clone();
        }
        Cut cut(network, world.group(), Group::alone("dp_replicate"), plan);
        for (const auto& item : network->named_parameters()) {
          EXPECT_EQ(item.value().scalar_type(), torch::kBFloat16);
        }
        const auto x = rows_of(plan, 0, 0).to(torch::kBFloat16);
        for (int step = 0; step < 20; ++step) {
          cut.forward({x})[0].to(torch::kFloat32).sum().backward();
          cut.units.finish();
          const torch::NoGradGuard no_grad;
          for (const auto& shard : cut.units.flat_shards()) {
            EXPECT_EQ(shard.tensor.scalar_type(), torch::kFloat32);
            EXPECT_EQ(shard.tensor.grad().scalar_type(), torch::kFloat32);
            // Less than the spacing of bfloat16 numbers of this size.
            Tensor value = shard.tensor.detach();
            value += value.abs() * 1e-4;
          }
          cut.units.after_update();
        }
        for (const auto& part : cut.units.parts()) {
          const Tensor old = before[part.name].flatten().slice(
              0, part.range.begin, part.range.end);
          const Tensor expected = old + old.abs() * 0.002;
          EXPECT_LE(
              parity::detail::largest(part.value - expected),
              1e-4 * std::max(parity::detail::largest(old), 1e-6))
              << part.name;
        }
        const auto gathered = cut.units.gather();
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

// Gradients of the bf16 computation, on any number of ranks.
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

TEST(BeforeReduce, SeesWholeGradients) {
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
      Cut cut(build(mine), world.group(), Group::alone("dp_replicate"), mine);
      forward_backward(cut, mine, world, 0);
      for (const auto& part : cut.units.parts()) {
        EXPECT_EQ(seen[part.name], stage == 1 ? 1 : 2) << part.name;
        const Tensor whole = expected.gradients[0].at(part.name) * 3;
        expect_part(
            part.name, whole, part.gradient, part.range, 1e-3, kTolerance);
      }
      for (const auto& item : cut.network->named_parameters()) {
        EXPECT_FALSE(item.value().grad().defined()) << item.key();
      }
    });
  }
}

// A parameter apart has the same range wherever it lives.
TEST(Apart, RangesDependOnTheShapeAlone) {
  Plan plan = with_stage(3);
  plan.options.apart = {"fc2.weight", "fc4.weight"};
  expect_parity({3}, plan);
  Ranks{3}.run([&](World& world) {
    ShardedUnits units(
        world.group(), Group::alone("dp_replicate"),
        {.apart = {"a.weight", "b.weight"}});
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

TEST(Values, OfTheFirstRankAreEveryones) {
  Ranks{4}.run([&](World& world) {
    const Plan plan = with_stage(3);
    const Groups groups(world, 2);
    auto network = build(plan);
    for (auto& parameter : network->parameters()) {
      const torch::NoGradGuard no_grad;
      parameter.add_(world.rank());
    }
    Cut cut(network, groups.shard, groups.replicate, plan, /*equal=*/false);
    const auto expected = build(plan);
    const auto gathered = cut.units.gather();
    for (const auto& item : expected->named_parameters()) {
      EXPECT_TRUE(
          torch::equal(item.value(), network->named_parameters()[item.key()]))
          << item.key();
    }
  });
}

// A skipped step changes nothing but the gradients.
TEST(AfterUpdate, OfASkippedStep) {
  for (const int stage : {1, 3}) {
    const Plan plan = with_stage(stage);
    const auto expected = on_one_device(plan);
    Ranks{2}.run([&](World& world) {
      Cut cut(build(plan), world.group(), Group::alone("dp_replicate"), plan);
      for (int round = 0; round < 3; ++round) {
        forward_backward(cut, plan, world, 0);
        expect_parts(
            "gradient of", expected.gradients[0], cut.units, world.group(),
            Which::gradients, kTolerance);
        const uint64_t from = world.history().count();
        cut.units.after_update(/*updated=*/false);
        EXPECT_EQ(world.history().count(), from);
        for (const auto& shard : cut.units.flat_shards()) {
          EXPECT_FALSE(shard.tensor.grad().defined());
        }
      }
    });
  }
}

// What is kept whole is on its way before the next forward asks for it.
TEST(AfterUpdate, GathersWhatIsKept) {
  for (const int stage : {1, 2, 3}) {
    Plan plan = with_stage(stage);
    plan.prepare = [](Network& network) {
      network.named_parameters()["fc3.weight"].set_requires_grad(false);
    };
    Ranks{2}.run([&](World& world) {
      Cut cut(build(plan), world.group(), Group::alone("dp_replicate"), plan);
      forward_backward(cut, plan, world, 0);
      const uint64_t from = world.history().count();
      cut.units.after_update();
      Counts expected;
      if (stage < 3) {
        for (const char* name : {"fc1", "fc2", "fc3", "norm", "fc4", "fc5"}) {
          expected["gather " + std::string(name)] = 1;
        }
      }
      // A frozen parameter is not sent again.
      EXPECT_EQ(labels_since(world, from), expected) << stage;
    });
  }
}

// Who holds gathered parameters over an update sees the new ones.
TEST(AfterUpdate, OfGatheredParameters) {
  for (const int stage : {1, 3}) {
    const Plan plan = with_stage(stage);
    Ranks{2}.run([&](World& world) {
      Cut cut(build(plan), world.group(), Group::alone("dp_replicate"), plan);
      const auto gathered = cut.units.gather();
      const auto weight = cut.network->named_parameters()["fc2.weight"];
      const Tensor before = weight.detach().clone();
      for (const auto& shard : cut.units.flat_shards()) {
        const torch::NoGradGuard no_grad;
        shard.tensor.detach().mul_(2);
      }
      cut.units.after_update();
      EXPECT_TRUE(torch::equal(weight, before * 2));
    });
  }
}

// Whole parameters take no memory while they are not used.
TEST(Memory, OfAStage3ModelIsItsShards) {
  Ranks{2}.run([&](World& world) {
    const Plan plan = with_stage(3);
    Cut cut(build(plan), world.group(), Group::alone("dp_replicate"), plan);
    const auto weight = cut.network->named_parameters()["fc2.weight"];
    EXPECT_EQ(weight.storage().data(), nullptr);
    {
      const auto gathered = cut.units.gather({1});
      EXPECT_NE(weight.storage().data(), nullptr);
    }
    EXPECT_EQ(weight.storage().data(), nullptr);
    int64_t shards = 0, gathered = 0;
    for (const auto& unit : cut.units.bytes()) {
      shards += unit.shard;
      gathered += unit.gathered;
      EXPECT_EQ(unit.gradient, unit.gathered);
    }
    EXPECT_EQ(2 * shards, gathered);
    int64_t numel = 0;
    for (const auto& item : cut.network->named_parameters()) {
      numel += item.value().numel();
    }
    EXPECT_GE(gathered, numel * 8);
  });
}

// However many units there are, two are gathered and two have flat gradients.
TEST(Memory, OfAStep) {
  Plan plan = with_stage(3);
  plan.list = LayerList();
  nets::add_linear(plan.list, "in", 6, 64);
  for (int i = 0; i < 8; ++i) {
    nets::add_linear(plan.list, "fc" + std::to_string(i), 64, 64);
  }
  for (const int64_t prefetch : {0, 1}) {
    plan.options.shard.prefetch = prefetch;
    Ranks{2}.run([&](World& world) {
      MemoryMeter meter;
      const auto counting = meter.count();
      Cut cut(build(plan), world.group(), Group::alone("dp_replicate"), plan);
      forward_backward(cut, plan, world, 0);
      cut.units.after_update();
      meter.reset_peak();
      forward_backward(cut, plan, world, 1);
      int64_t unit = 0, shards = 0;
      for (const auto& one : cut.units.bytes()) {
        unit = std::max(unit, one.gathered);
        shards += one.shard;
      }
      EXPECT_GE(unit, 64 * 64 * 8);
      const auto peak = meter.peak();
      EXPECT_EQ(peak[MemoryKind::parameters], shards);
      const int64_t whole =
          peak[MemoryKind::gathered] + peak[MemoryKind::gradients] - shards;
      EXPECT_GE(whole, (2 + prefetch) * unit);
      // And the first layer's, which is small.
      EXPECT_LE(whole, (3 + prefetch) * unit + unit / 2);
    });
  }
}

// A unit whose gradients are complete is freed, and none is gathered for a
// forward that comes after an update.
TEST(Memory, NothingIsGatheredWhenBackwardEnds) {
  for (const int64_t prefetch : {0, 1, 3}) {
    Plan plan = with_stage(3);
    plan.options.shard.prefetch = prefetch;
    plan.microbatches = 2;
    Ranks{2}.run([&](World& world) {
      Cut cut(build(plan), world.group(), Group::alone("dp_replicate"), plan);
      for (int step = 0; step < 3; ++step) {
        forward_backward(cut, plan, world, step);
        for (const auto& item : cut.network->named_parameters()) {
          EXPECT_EQ(item.value().storage().data(), nullptr)
              << item.key() << " step " << step << " prefetch " << prefetch;
        }
        cut.units.after_update();
      }
    });
  }
}

// Blocks for what steps do not need go back: all units were gathered once.
TEST(Memory, OfAllUnitsGoesBack) {
  Ranks{2}.run([&](World& world) {
    Plan plan = with_stage(3);
    plan.list = LayerList();
    // Of one size.
    for (int i = 0; i < 6; ++i) {
      nets::add_linear(plan.list, "fc" + std::to_string(i), 6, 6);
    }
    MemoryMeter meter;
    const auto counting = meter.count();
    Cut cut(build(plan), world.group(), Group::alone("dp_replicate"), plan);
    const int64_t unit = cut.units.bytes()[0].gathered;
    const int64_t shards = 6 * cut.units.bytes()[0].shard;
    {
      const auto all = cut.units.gather();
      EXPECT_EQ(meter.now()[MemoryKind::gathered], 6 * unit);
    }
    for (int step = 0; step < 2; ++step) {
      forward_backward(cut, plan, world, step);
      cut.units.after_update();
    }
    const auto kept = meter.now();
    // Two that are gathered and two flat gradients come with the next step.
    EXPECT_LE(
        kept[MemoryKind::gathered] + kept[MemoryKind::gradients],
        shards + 4 * unit);
  });
}

// What offload leaves between two steps: of masters in float64 and layers that
// compute in float32.
TEST(Memory, OfOffloadBetweenSteps) {
  for (const int stage : {1, 2, 3}) {
    SCOPED_TRACE(stage);
    Plan plan = with_stage(stage);
    plan.options.compute = torch::kFloat32;
    plan.around = [](Forward forward) {
      return [forward](const Tensors& inputs) {
        return forward({inputs[0].to(torch::kFloat32)});
      };
    };
    const auto kept = [&](bool optimizer, bool shards) {
      MemoryByKind kept;
      std::mutex mutex;
      plan.options.offload_optimizer = optimizer;
      plan.options.offload_shards = shards;
      Ranks{2}.run([&](World& world) {
        MemoryMeter meter;
        const auto counting = meter.count();
        Cut cut(build(plan), world.group(), Group::alone("dp_replicate"), plan);
        forward_backward(cut, plan, world, 0);
        cut.units.after_update();
        const std::lock_guard lock(mutex);
        if (world.rank() == 0) kept = meter.now();
      });
      return kept;
    };
    const auto here = kept(false, false);
    const int64_t masters = here[MemoryKind::parameters];
    const auto optimizer = kept(true, false);
    const auto shards = kept(true, true);
    if (stage == 3) {
      // With a copy in the compute dtype, or without.
      EXPECT_EQ(optimizer[MemoryKind::parameters], masters + masters / 2);
    } else {
      EXPECT_EQ(optimizer[MemoryKind::parameters], masters);
      EXPECT_EQ(optimizer[MemoryKind::gathered], masters);
    }
    EXPECT_EQ(shards[MemoryKind::parameters], masters);
    EXPECT_LT(shards[MemoryKind::gathered], masters);
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
  EXPECT_THAT(
      message_of([&] {
        units.add("two", {{"two.weight", first}});
      }),
      AllOf(HasSubstr("two.weight"), HasSubstr("unit \"one\"")));
  EXPECT_THAT(
      message_of([&] {
        units.add("two", {{"two.ids", torch::zeros({3}, torch::kLong)}});
      }),
      AllOf(HasSubstr("two.ids"), HasSubstr("Long")));
  const Tensor base = torch::zeros({6, 6});
  EXPECT_THAT(
      message_of([&] {
        units.add("two", {{"two.a", base}, {"two.b", base.detach()}});
      }),
      AllOf(HasSubstr("two.b"), HasSubstr("two.a")));
  EXPECT_THAT(
      message_of([&] {
        units.add("two", {{"two.view", base.narrow(0, 1, 2)}});
      }),
      AllOf(HasSubstr("two.view"), HasSubstr("view")));
  EXPECT_THAT(
      message_of([&] {
        units.add("two", {{"two.sparse", torch::eye(3).to_sparse()}});
      }),
      AllOf(HasSubstr("two.sparse"), HasSubstr("sparse")));
  EXPECT_EQ(units.size(), 1U);
  EXPECT_EQ(units.unit_of(first), 0U);
  EXPECT_EQ(units.unit_of(base), std::nullopt);
}

TEST(Mistakes, TooLittleHostMemory) {
  MemoryMeter meter;
  const auto counting = meter.count();
  ShardedUnits units(
      Group::alone("dp_shard"), Group::alone("dp_replicate"),
      {.offload_optimizer = true});
  const Tensor big = weights({200, 200});
  meter.limit(meter.now().total() + 200 * 200 * 8 + 1000);
  const std::string message = message_of<Error>([&] {
    units.add("big", {{"big.weight", big}});
  });
  meter.limit(0);
  EXPECT_THAT(
      message,
      AllOf(HasSubstr("offload"), HasSubstr("320000 bytes"), HasSubstr("big")));
}

TEST(Mistakes, TwoBackwardsInOneRound) {
  Ranks{2}.run([&](World& world) {
    const Plan plan = with_stage(3);
    Cut cut(build(plan), world.group(), Group::alone("dp_replicate"), plan);
    const Tensor x = rows_of(plan, 0, 0);
    cut.forward({x})[0].sum().backward();
    const std::string message =
        message_of([&] { cut.forward({x})[0].sum().backward(); });
    EXPECT_THAT(message, AllOf(HasSubstr("fc5"), HasSubstr("begin_backward")));
  });
}

TEST(Mistakes, CreateGraph) {
  Ranks{2}.run([&](World& world) {
    const Plan plan = with_stage(3);
    Cut cut(build(plan), world.group(), Group::alone("dp_replicate"), plan);
    const Tensor x = rows_of(plan, 0, 0).requires_grad_();
    const std::string message = message_of([&] {
      torch::autograd::grad(
          {cut.forward({x})[0].sum()}, {x}, {}, std::nullopt,
          /*create_graph=*/true);
    });
    EXPECT_THAT(message, AllOf(HasSubstr("create_graph"), HasSubstr("fc5")));
  });
}

}  // namespace sharded_options_test
}  // namespace echelon
