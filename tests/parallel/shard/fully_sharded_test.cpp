#include "echelon/parallel/shard/fully_sharded.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "echelon/error.h"
#include "echelon/optim/optimizer.h"
#include "tests/parallel/data/nets.h"
#include "tests/parallel/shard/parts.h"
#include "tests/support/error_text.h"
#include "tests/support/parity.h"
#include "tests/support/ranks.h"

namespace echelon::fully_sharded_test {

using namespace sharding_test;
using testing::HasSubstr;
using torch::Tensor;

// A user's autograd function that saves a parameter itself.
struct Scale : torch::autograd::Function<Scale> {
  static Tensor forward(
      torch::autograd::AutogradContext* context, const Tensor& x,
      const Tensor& by) {
    context->save_for_backward({x, by});
    return x * by;
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * saved[1], (gradients[0] * saved[0]).sum(0)};
  }
};

// A function that saves parameters of two units.
struct ScaleTwice : torch::autograd::Function<ScaleTwice> {
  static Tensor forward(
      torch::autograd::AutogradContext* context, const Tensor& x,
      const Tensor& a, const Tensor& b) {
    context->save_for_backward({x, a, b});
    return x * a * b;
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const Tensor &x = saved[0], &a = saved[1], &b = saved[2];
    const Tensor& g = gradients[0];
    return {g * (a * b), (g * x * b).sum(0), (g * x * a).sum(0)};
  }
};

struct BlockImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) {
    return x + Scale::apply(fc2(torch::gelu(fc1(norm(x)))), scale);
  }
  torch::nn::Linear fc1 = register_module("fc1", torch::nn::Linear(8, 12));
  torch::nn::Linear fc2 = register_module("fc2", torch::nn::Linear(12, 8));
  torch::nn::LayerNorm norm = register_module(
      "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})));
  Tensor scale = register_parameter("scale", torch::ones({8}));
};
TORCH_MODULE(Block);

// [batch, 6] -> [batch, 4]. Some blocks are used under a condition or several
// times, and one matrix at both ends.
struct UserNetImpl : torch::nn::Module {
  UserNetImpl() {
    in = register_parameter("in", torch::randn({6, 8}));
    blocks = register_module(
        "blocks", torch::nn::ModuleList(Block(), Block(), Block()));
    head = register_module(
        "head", torch::nn::Sequential(
                    torch::nn::Linear(6, 5), torch::nn::Tanh(),
                    torch::nn::Linear(5, 4)));
    register_buffer("calls", torch::zeros({1}));
  }
  std::tuple<Tensor, Tensor> forward(const Tensor& x, bool twice) {
    Tensor h = x.mm(in);
    h = blocks->at<BlockImpl>(0).forward(h);
    h = blocks->at<BlockImpl>(1).forward(h);
    if (twice) h = blocks->at<BlockImpl>(0).forward(h);
    // One operator reads parameters of two units.
    h = torch::addcmul(
        h, blocks->at<BlockImpl>(1).scale, blocks->at<BlockImpl>(2).scale);
    h = ScaleTwice::apply(
        h, blocks->at<BlockImpl>(0).scale, blocks->at<BlockImpl>(2).scale);
    h = blocks->at<BlockImpl>(2).forward(h);
    return {head->forward(h.mm(in.t())), h.square().mean(1)};
  }
  Tensor in;
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::Sequential head{nullptr};
};
TORCH_MODULE(UserNet);

UserNet make_net(uint64_t seed = 3) {
  UserNet net;
  parity::give_values(*net, seed);
  return net;
}

constexpr int64_t kRows = 7;

Tensor rows_of(int step, int microbatch) {
  return parity::random(
      {kRows, 6}, 1000 * static_cast<uint64_t>(step) + microbatch);
}

Tensor loss_sum(const std::tuple<Tensor, Tensor>& outputs) {
  return std::get<0>(outputs).sin().sum() + std::get<1>(outputs).sum();
}

struct Case {
  int stage = 3;
  int microbatches = 1;
  bool no_sync = false;
  bool frozen = false;
  int64_t prefetch = 1;
  std::vector<std::string> units = {"blocks.*", "head"};
};

constexpr int kSteps = 3;

UserNet net_of(const Case& one, uint64_t seed = 3) {
  UserNet net = make_net(seed);
  if (one.frozen) {
    net->blocks->at<BlockImpl>(1).fc1->weight.set_requires_grad(false);
    for (auto& parameter : net->head->parameters()) {
      parameter.set_requires_grad(false);
    }
  }
  return net;
}

FullyShardedOptions
options_of(World& world, int stage = 3, const Case& one = {}) {
  FullyShardedOptions options{.shard = world.group(), .units = one.units};
  options.sharding.shard.stage = stage;
  options.sharding.shard.prefetch = one.prefetch;
  return options;
}

parity::Record on_one_device(const Case& one) {
  UserNet net = net_of(one);
  torch::optim::SGD optimizer(
      net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  parity::Record record;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    double loss = 0;
    for (int m = 0; m < one.microbatches; ++m) {
      const Tensor mean = loss_sum(net->forward(rows_of(step, m), step != 1)) /
                          static_cast<double>(kRows * one.microbatches);
      mean.backward();
      loss += mean.item<double>();
    }
    record.step(*net, loss);
    optimizer.step();
  }
  record.end(*net);
  return record;
}

void expect_parity(const Ranks& ranks, const Case& one) {
  const auto expected = on_one_device(one);
  ranks.run([&](World& world) {
    SCOPED_TRACE("rank " + std::to_string(world.rank()));
    UserNet net = net_of(one, 3 + world.rank());
    FullyShardedDataParallel<UserNetImpl> sharded(
        net.ptr(), options_of(world, one.stage, one));
    torch::optim::SGD optimizer(
        sharded.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    const auto own = even_range(kRows, world.rank(), world.size());
    for (int step = 0; step < kSteps; ++step) {
      for (int m = 0; m < one.microbatches; ++m) {
        std::shared_ptr<void> no_sync;
        if (one.no_sync && m + 1 < one.microbatches) {
          no_sync = sharded.no_sync();
        }
        const Tensor x = rows_of(step, m).narrow(0, own.begin, own.size());
        (loss_sum(sharded(x, step != 1)) * static_cast<double>(world.size()) /
         static_cast<double>(kRows * one.microbatches))
            .backward();
      }
      expect_parts(
          "step " + std::to_string(step) + " gradient of",
          expected.gradients[step], sharded.units(), world.group(),
          Which::gradients, 1e-10);
      optimizer.step();
      sharded.after_update();
      const torch::NoGradGuard no_grad;
      EXPECT_TRUE(std::get<0>(sharded(rows_of(0, 0), true))
                      .isfinite()
                      .all()
                      .item<bool>());
    }
    expect_parts(
        "parameter", expected.parameters, sharded.units(), world.group(),
        Which::values, 1e-10);
  });
}

class FullySharded : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stage, FullySharded, testing::Values(1, 2, 3));

TEST_P(FullySharded, TrainsAnyModule) {
  for (const Ranks& ranks :
       {Ranks{1}, Ranks{2}, Ranks{3}, Ranks{2, BackendKind::gloo}}) {
    expect_parity(ranks, {.stage = GetParam()});
  }
  expect_parity({2}, {.stage = GetParam(), .prefetch = 0});
  expect_parity({2}, {.stage = GetParam(), .prefetch = 3});
}

TEST_P(FullySharded, AnyChoiceOfUnits) {
  expect_parity({2}, {.stage = GetParam(), .units = {}});
  expect_parity({2}, {.stage = GetParam(), .units = {"*"}});
  expect_parity(
      {3}, {.stage = GetParam(), .units = {"blocks.1.fc1", "head.0"}});
}

TEST_P(FullySharded, Accumulates) {
  expect_parity({2}, {.stage = GetParam(), .microbatches = 3});
  expect_parity({2}, {.stage = GetParam(), .microbatches = 3, .no_sync = true});
}

// The whole loop of a user, as short as with DistributedDataParallel.
TEST_P(FullySharded, ParameterGroupsTrainLikeOneDevice) {
  const OptimizerOptions adamw{
      .name = OptimizerKind::adamw, .learning_rate = 0.01, .weight_decay = 0.1};
  auto plain = make_net();
  auto reference = make_optimizer(adamw, *plain);
  for (int step = 0; step < kSteps; ++step) {
    reference->zero_grad();
    loss_sum(plain->forward(rows_of(step, 0), false)).backward();
    reference->step();
  }
  parity::Record expected;
  expected.end(*plain);
  Ranks{2}.run([&](World& world) {
    FullyShardedDataParallel<UserNetImpl> sharded(
        make_net().ptr(), options_of(world, GetParam()));
    const auto groups = sharded.parameter_groups(adamw.decay());
    ASSERT_EQ(groups.size(), 2U);
    EXPECT_EQ(groups[0].weight_decay, 0.1);
    EXPECT_EQ(groups[1].weight_decay, 0.0);
    EXPECT_EQ(
        groups[0].parameters.size() + groups[1].parameters.size(),
        sharded.parameters().size());

    auto optimizer = make_optimizer(adamw, groups);
    for (int step = 0; step < kSteps; ++step) {
      loss_sum(sharded(rows_of(step, 0), false)).backward();
      optimizer->step();
      sharded.after_update();
    }
    expect_parts(
        "parameter", expected.parameters, sharded.units(), world.group(),
        Which::values, 1e-9);
  });
}

// Backward sends nothing under no_sync(), and one sum per unit after it.
TEST_P(FullySharded, NoSyncSendsNothing) {
  Ranks{2}.run([&](World& world) {
    FullyShardedDataParallel<UserNetImpl> sharded(
        make_net().ptr(), options_of(world, GetParam()));
    const auto reductions = [&] {
      std::map<std::string, int> counts;
      for (const auto& record : world.history().snapshot()) {
        if (record.label.starts_with("reduce ")) ++counts[record.label];
      }
      return counts;
    };
    for (int microbatch = 0; microbatch < 2; ++microbatch) {
      const auto no_sync = sharded.no_sync();
      loss_sum(sharded(rows_of(0, microbatch), true)).backward();
      EXPECT_TRUE(reductions().empty());
    }
    loss_sum(sharded(rows_of(0, 2), true)).backward();
    const auto counts = reductions();
    EXPECT_EQ(counts.size(), 5U);  // three blocks, the head, the rest
    for (const auto& [label, count] : counts) EXPECT_EQ(count, 1) << label;
  });
}

TEST(FullySharded, BuffersStartWithRankZerosValues) {
  for (const bool broadcast : {true, false}) {
    Ranks{4}.run([&](World& world) {
      const bool first = world.rank() % 2 == 0;
      const int base = world.rank() / 2 * 2;
      auto net = make_net();
      const Tensor calls = net->named_buffers()["calls"];
      calls.fill_(1 + world.rank());
      const FullyShardedModule sharded(
          *net,
          {.shard = world.new_group("dp_shard", {base, base + 1}),
           .replicate = world.new_group(
               "dp_replicate", first ? std::vector{0, 2} : std::vector{1, 3}),
           .units = {"*"},
           .broadcast_values = broadcast});
      EXPECT_EQ(
          calls.item<float>(),
          broadcast ? 1 : static_cast<float>(1 + world.rank()));
    });
  }
}

TEST_P(FullySharded, Frozen) {
  expect_parity({2}, {.stage = GetParam(), .frozen = true});
}

TEST(FullySharded, Sequential) {
  const auto make = [] {
    torch::nn::Sequential net(
        torch::nn::Linear(6, 9), torch::nn::ReLU(), torch::nn::BatchNorm1d(9),
        torch::nn::Linear(9, 4));
    parity::give_values(*net, 3);
    return net;
  };
  auto plain = make();
  plain->forward(rows_of(0, 0)).square().sum().backward();
  Ranks{2}.run([&](World& world) {
    auto net = make();
    FullyShardedDataParallel<torch::nn::SequentialImpl> sharded(
        net.ptr(), {.shard = world.group(), .units = {"0", "2", "3"}});
    sharded(rows_of(0, 0)).square().sum().backward();
    expect_parts(
        "gradient of", parity::gradients_of(*plain), sharded.units(),
        world.group(), Which::gradients, 1e-10);
    // Buffers match the plain module's.
    for (const auto& item : plain->named_buffers()) {
      EXPECT_TRUE(torch::equal(item.value(), net->named_buffers()[item.key()]))
          << item.key();
    }
  });
}

// The units in use and those prefetched are unsharded, not the whole module.
TEST(FullySharded, FreesUnusedUnits) {
  Ranks{2}.run([&](World& world) {
    auto net = make_net();
    FullyShardedDataParallel<UserNetImpl> sharded(net.ptr(), options_of(world));
    const auto num_unsharded = [&] {
      int count = 0;
      for (const auto& item : net->named_parameters()) {
        if (!item.key().ends_with("0.fc1.weight") &&
            !item.key().ends_with("1.fc1.weight") &&
            !item.key().ends_with("2.fc1.weight")) {
          continue;
        }
        count += item.value().storage().data() != nullptr;
      }
      return count;
    };
    EXPECT_EQ(num_unsharded(), 0);
    for (int step = 0; step < 2; ++step) {
      const Tensor loss = loss_sum(sharded(rows_of(0, 0), false));
      EXPECT_LE(num_unsharded(), 1);
      loss.backward();
      EXPECT_LE(num_unsharded(), 2);
      sharded.after_update();
      EXPECT_EQ(num_unsharded(), 0);
    }
  });
}

TEST(FullySharded, NamesMistakes) {
  const auto message = [](std::vector<std::string> units) {
    return error_text<ConfigError>([&] {
      auto net = make_net();
      FullyShardedModule sharded(*net, {.units = std::move(units)});
    });
  };
  EXPECT_THAT(
      message({"block"}), HasAll("\"block\"", "did you mean \"blocks\""));
  EXPECT_THAT(message({"heads.*"}), HasSubstr("did you mean \"head\""));
  EXPECT_THAT(
      message({"blocks.1.fc1", "blocks.1"}),
      HasSubstr("\"blocks.1.fc1\" lies inside unit \"blocks.1\""));
  EXPECT_THAT(message({"head", "head"}), HasSubstr("twice"));
  EXPECT_THAT(message({"head.1"}), HasSubstr("no parameters"));
  EXPECT_THAT(
      error_text<ConfigError>([] {
        nets::Shared net;
        FullyShardedModule sharded(*net, {.units = {"first", "second"}});
      }),
      HasAll("first.weight", "second.weight"));
}

TEST(FullySharded, RefusesCreateGraph) {
  Ranks{2}.run([&](World& world) {
    FullyShardedDataParallel<UserNetImpl> sharded(
        make_net().ptr(), options_of(world));
    const Tensor x = rows_of(0, 0).requires_grad_();
    EXPECT_THAT(
        error_text<ConfigError>([&] {
          torch::autograd::grad(
              {loss_sum(sharded(x, true))}, {x}, {}, std::nullopt,
              /*create_graph=*/true);
        }),
        HasSubstr("create_graph"));
  });
}

}  // namespace echelon::fully_sharded_test
