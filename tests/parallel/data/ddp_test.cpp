#include "echelon/parallel/data/distributed_data_parallel.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "echelon/error.h"
#include "tests/parallel/data/training.h"
#include "tests/support/error_text.h"

namespace echelon::ddp_test {

using nets::Branch;
using nets::Conv;
using nets::Mlp;
using nets::Norm;
using nets::OneMemory;
using nets::Shared;
using testing::HasSubstr;
using torch::Tensor;
using training::all_in_place;
using training::batch_of;
using training::expect_parity;
using training::expect_same_on_all_ranks;
using training::loss_sum;
using training::Plan;
using training::with_ddp;
using training::with_values;

std::string error_on(int size, const std::function<void(World&)>& body) {
  return error_text<ConfigError>([&] { run_ranks(size, body); });
}

class Parity : public testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(
    Ranks, Parity, testing::ValuesIn(ranks_of({1, 2, 3, 4})),
    testing::PrintToStringParamName());

TEST_P(Parity, Mlp) {
  expect_parity<Mlp>(GetParam(), {});
}
TEST_P(Parity, Conv) {
  expect_parity<Conv>(GetParam(), {});
}
TEST_P(Parity, SharedParameters) {
  expect_parity<Shared>(GetParam(), {});
}
TEST_P(Parity, GradientsInOneMemory) {
  expect_parity<OneMemory>(GetParam(), {.options = all_in_place()});
}
TEST_P(Parity, OneBucket) {
  expect_parity<Conv>(GetParam(), {.options = {}});
}
TEST_P(Parity, EveryGradientInPlace) {
  expect_parity<Conv>(GetParam(), {.options = all_in_place()});
}
TEST_P(Parity, GradientsSetToZero) {
  expect_parity<Conv>(GetParam(), {.clear = false});
}
TEST_P(Parity, Accumulation) {
  expect_parity<Mlp>(GetParam(), {.microbatches = 3});
}
TEST_P(Parity, UnevenBatches) {
  const std::vector<std::vector<int64_t>> shares = {
      {13}, {9, 4}, {9, 0, 4}, {1, 2, 3, 7}};
  expect_parity<Conv>(
      GetParam(), {.batch = 13, .shares = shares[GetParam().size - 1]});
}
TEST_P(Parity, UnevenBatchesWithAccumulation) {
  expect_parity<Mlp>(GetParam(), {.microbatches = 2, .batch = 13});
}

// Two ranks with equal shares: each element is (a + b) / 2 in both runs, if the
// one device adds the two halves in that order.
TEST(Ddp, TwoRanksMatchOneDeviceBitForBit) {
  const Plan plan;
  parity::Record expected;
  {
    auto net = with_values(Conv(), 3);
    auto optimizer = training::optimizer_of(*net);
    for (int step = 0; step < plan.steps; ++step) {
      optimizer.zero_grad();
      const auto [x, y] = batch_of(plan, step, 0);
      double loss = 0;
      for (int half = 0; half < 2; ++half) {
        const auto part =
            loss_sum(net(x.narrow(0, half * 6, 6)), y.narrow(0, half * 6, 6));
        // The factor of global_mean, and the division after the sum.
        (part * (2.0 / 12.0) / 2.0).backward();
        loss += (part * (2.0 / 12.0)).item<double>();
      }
      expected.step(*net, loss / 2.0);
      optimizer.step();
    }
    expected.end(*net);
  }
  run_ranks(2, [&](World& world) {
    const auto actual = training::on_ranks(
        with_values(Conv(), 3 + world.rank()), world.group(), plan);
    parity::expect_parity(expected, actual, parity::kExact);
  });
}

// -------------------------------------------------------- unused parameters

// Whether a rank takes the left branch in a step, or the right one.
bool takes_left(int step, int rank) {
  if (step == 0) return true;  // right: on no rank
  if (step == 1) return false;
  return rank == step % 2;  // on some ranks only
}

TEST_P(Parity, UnusedParameters) {
  const int num_ranks = GetParam().size;
  Plan plan;
  plan.steps = 5;
  plan.options.find_unused_parameters = true;
  // On one device, each share of the batch takes the branch of its rank.
  parity::Record expected;
  {
    auto net = with_values(Branch(), 3);
    auto optimizer = training::optimizer_of(*net);
    for (int step = 0; step < plan.steps; ++step) {
      training::zero(optimizer, plan);
      const auto [x, y] = batch_of(plan, step, 0);
      Tensor loss = torch::zeros({}, torch::kFloat64);
      int64_t begin = 0;
      for (int rank = 0; rank < num_ranks; ++rank) {
        const int64_t size = even_split(plan.batch, num_ranks)[rank];
        const auto out = net(x.narrow(0, begin, size), takes_left(step, rank));
        loss = loss + loss_sum(out, y.narrow(0, begin, size)) / 12.0;
        begin += size;
      }
      loss.backward();
      expected.step(*net, loss.item<double>());
      optimizer.step();
    }
    expected.end(*net);
  }
  GetParam().run([&](World& world) {
    int step = 0;
    const auto actual = training::on_ranks<Branch>(
        with_values(Branch(), 3 + world.rank()), world.group(), plan,
        [&](auto& ddp, const Tensor& x) {
          return ddp(x, takes_left(step++, world.rank()));
        });
    SCOPED_TRACE("rank " + std::to_string(world.rank()));
    // "never" has no gradient on any rank and keeps none.
    parity::expect_parity(expected, actual, parity::kRounding);
  });
}

/// Uses no parameter when `pass` is true.
struct PassImpl : torch::nn::Module {
  Tensor forward(const Tensor& x, bool pass) { return pass ? x * 2 : fc(x); }
  torch::nn::Linear fc = register_module("fc", torch::nn::Linear(6, 6));
};
TORCH_MODULE(Pass);

// Rank 1's backward reaches no parameter at all.
TEST(Ddp, AllParametersUnusedOnOneRank) {
  run_ranks(2, [](World& world) {
    auto net = with_values(Pass(), 3);
    DistributedDataParallel<Pass> ddp(
        net, world.group(), {.find_unused_parameters = true});
    const Tensor x = parity::random({2, 6}, 1).requires_grad_();
    ddp(x, world.rank() == 1).sum().backward();
    auto alone = with_values(Pass(), 3);
    alone(x, false).sum().backward();
    EXPECT_TRUE(torch::allclose(
        net->fc->weight.grad(), alone->fc->weight.grad() / 2, 1e-12));
  });
}

TEST(Ddp, MissingGradientsAreNamedInTheSameStep) {
  const auto error = error_text<ConfigError>([] {
    with_ddp<Branch>(2, [](World& world, Branch& net, auto& ddp) {
      ddp(parity::random({2, 6}, 1), true).sum().backward();
    });
  });
  EXPECT_THAT(
      error, HasAll(
                 "4 of 8 parameters got no gradient",
                 "\"right.weight\", \"right.bias\", \"never.weight\"",
                 "find_unused_parameters"));
}

// The same while other buckets are being reduced.
TEST(Ddp, MissingGradientWhileBucketsAreReduced) {
  const auto error = error_text<ConfigError>([] {
    with_ddp<Branch>(2, {.in_place_bytes = 1}, [](World&, Branch&, auto& ddp) {
      ddp(parity::random({2, 6}, 1), true).sum().backward();
    });
  });
  EXPECT_THAT(error, HasSubstr("4 of 8 parameters got no gradient"));
}

TEST_P(Parity, FrozenParameters) {
  const Plan plan;
  const auto make = [](uint64_t seed) {
    auto net = with_values(Conv(), seed);
    net->conv1->weight.set_requires_grad(false);
    net->fc->bias.set_requires_grad(false);
    return net;
  };
  const auto expected = training::on_one_device(make(3), plan);
  GetParam().run([&](World& world) {
    const auto actual =
        training::on_ranks(make(3 + world.rank()), world.group(), plan);
    parity::expect_parity(expected, actual, parity::kRounding);
  });
}

// A discriminator is frozen while its generator trains.
TEST(Ddp, ParametersFrozenForSomeSteps) {
  with_ddp<Mlp>(2, [](World& world, Mlp& net, auto& ddp) {
    const auto freeze = [&](bool frozen) {
      for (auto& parameter : net->parameters()) {
        parameter.set_requires_grad(!frozen);
      }
    };
    Tensor x = parity::random({2, 6}, world.rank()).requires_grad_();
    freeze(true);
    const auto before = world.history().count();
    ddp(x).sum().backward();
    EXPECT_EQ(world.history().count(), before);
    EXPECT_FALSE(net->fc1->weight.grad().defined());
    freeze(false);
    ddp(x).sum().backward();
    expect_same_on_all_ranks(world, net->fc1->weight.grad());
  });
}

TEST(Ddp, SomeParametersFrozenLater) {
  with_ddp<Mlp>(2, Plan().options, [](World& world, Mlp& net, auto& ddp) {
    net->fc2->weight.set_requires_grad(false);
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      ddp(parity::random({2, 6}, world.rank())).sum().backward();
      for (const auto& item : net->named_parameters()) {
        if (!item.value().requires_grad()) continue;
        expect_same_on_all_ranks(world, item.value().grad(), item.key());
      }
    }
  });
}

TEST(Ddp, UnfrozenAfterWrappingIsAnError) {
  const auto error = error_on(2, [](World& world) {
    auto net = with_values(Mlp(), 3);
    net->fc1->bias.set_requires_grad(false);
    DistributedDataParallel<Mlp> ddp(net, world.group());
    net->fc1->bias.set_requires_grad(true);
    ddp(parity::random({2, 6}, 1));
  });
  EXPECT_THAT(error, HasSubstr("\"fc1.bias\" was frozen when"));
}

// -------------------------------------------------------------------- buffers

TEST(Ddp, BuffersComeFromRankZero) {
  with_ddp<Norm>(3, [](World& world, Norm& net, auto& ddp) {
    net->norm->running_mean.fill_(world.rank());
    net->norm->num_batches_tracked.fill_(10 * world.rank());
    const Tensor x = parity::random({4, 6}, world.rank());
    ddp(x).sum().backward();
    // Rank 0's buffers, then one update with this rank's batch.
    EXPECT_EQ(net->norm->num_batches_tracked.item<int64_t>(), 1);
    EXPECT_LT(net->norm->running_mean.abs().max().item<double>(), 1.0);
    net->norm->running_mean.fill_(world.rank());
    net->eval();
    ddp(x);
    EXPECT_EQ(net->norm->running_mean[0].item<double>(), world.rank());
    net->train();
    DistributedDataParallel<Norm> own(
        net, world.group(), {.broadcast_buffers = false});
    net->norm->num_batches_tracked.fill_(10 * world.rank());
    own(x).sum().backward();
    EXPECT_EQ(
        net->norm->num_batches_tracked.item<int64_t>(), 10 * world.rank() + 1);
  });
}

TEST_P(Parity, SyncBatchNormByOption) {
  Plan plan;
  plan.batch = 13;
  plan.options.sync_batch_norm = true;
  expect_parity<Norm>(GetParam(), plan, 1e-11);
}

// ---------------------------------------------------------------- construction

TEST(Ddp, FirstDifferenceOfModelsIsNamed) {
  const auto error = error_on(3, [](World& world) {
    auto net = with_values(Mlp(), 3);
    if (world.rank() == 2) {
      net->fc2 = net->replace_module(
          "fc2", torch::nn::Linear(torch::nn::LinearOptions(16, 17)));
    }
    DistributedDataParallel<Mlp> ddp(net, world.group());
  });
  EXPECT_THAT(
      error, HasAll(
                 "ranks 0, 1 has parameter \"fc2.weight\" 16x16 Double",
                 "rank 2 has parameter \"fc2.weight\" 17x16 Float"));
}

TEST(Ddp, MissingParametersAreAnError) {
  const auto error = error_on(2, [](World& world) {
    auto net = with_values(Mlp(), 3);
    if (world.rank() == 1) net->unregister_module("fc3");
    DistributedDataParallel<Mlp> ddp(net, world.group());
  });
  EXPECT_THAT(error, HasSubstr("rank 1 has nothing more"));
}

TEST(Ddp, NothingToTrainIsAnError) {
  const auto error = error_on(2, [](World& world) {
    Mlp net;
    for (auto& parameter : net->parameters()) {
      parameter.set_requires_grad(false);
    }
    DistributedDataParallel<Mlp> ddp(net, world.group());
  });
  EXPECT_THAT(error, HasSubstr("no parameter of the model requires grad"));
}

// -------------------------------------------------------------------- buckets

TEST(Ddp, BucketsFollowTheOrderOfTheFirstBackward) {
  const DistributedDataParallelOptions options{
      .bucket_bytes = 1, .first_bucket_bytes = 1};
  with_ddp<Mlp>(2, options, [](World& world, Mlp& net, auto& ddp) {
    const std::vector<std::vector<std::string>> reverse = {
        {"fc3.bias"},   {"fc3.weight"}, {"fc2.bias"},
        {"fc2.weight"}, {"fc1.bias"},   {"fc1.weight"}};
    EXPECT_EQ(ddp.buckets(), reverse);
    // fc1 after fc3 now: its gradients come first.
    const Tensor x = parity::random({2, 6}, 1);
    const auto run = [&] {
      const Tensor h =
          net->fc3(net->fc2(torch::ones({2, 16}, torch::kFloat64)));
      (net->fc1(x).narrow(1, 0, 4) * h.detach() + h).sum().backward();
    };
    run();
    EXPECT_NE(ddp.buckets(), reverse);
    EXPECT_EQ(ddp.buckets().size(), reverse.size());
  });
}

// Nothing is copied back, and steps allocate no new buffer.
TEST(Ddp, SmallGradientsAreInTheirBucket) {
  with_ddp<Mlp>(2, [](World& world, Mlp& net, auto& ddp) {
    const void* memory = nullptr;
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      ddp(parity::random({2, 6}, step)).sum().backward();
      std::set<const void*> storages, places;
      for (const auto& parameter : net->parameters()) {
        storages.insert(parameter.grad().storage().data());
        places.insert(parameter.grad().data_ptr());
        EXPECT_FALSE(parameter.grad().is_view());  // detach_() works on it
      }
      EXPECT_EQ(storages.size(), 1u);
      EXPECT_EQ(places.size(), net->parameters().size());
      if (step > 0) {
        EXPECT_EQ(*storages.begin(), memory);
      }
      memory = *storages.begin();
    }
  });
}

TEST(Ddp, AHeldGradientKeepsItsValues) {
  run_ranks(2, [](World& world) {
    for (const bool as_alias : {false, true}) {
      auto net = with_values(Mlp(), 3);
      DistributedDataParallel<Mlp> ddp(net, world.group());
      const auto gradient = [&](int seed) {
        net->zero_grad();
        ddp(parity::random({2, 6}, seed)).square().sum().backward();
        return net->fc1->weight.grad();
      };
      const Tensor kept = as_alias ? gradient(1).detach() : gradient(1);
      const Tensor values = kept.clone();
      for (int seed = 2; seed < 5; ++seed) {
        const Tensor next = gradient(seed);
        EXPECT_TRUE(kept.equal(values)) << seed;
        EXPECT_FALSE(next.equal(values)) << seed;
      }
      EXPECT_TRUE(gradient(1).equal(values));
    }
  });
}

// Gradients that are set to zero keep their memory, so a held tensor gets each
// mean.
TEST(Ddp, AHeldGradientSetToZeroGetsEachMean) {
  run_ranks(2, [](World& world) {
    for (const bool by_module : {false, true}) {
      auto net = with_values(Mlp(), 3);
      DistributedDataParallel<Mlp> ddp(net, world.group());
      auto optimizer = training::optimizer_of(*net);
      Tensor held;
      for (int step = 0; step < 4; ++step) {
        if (by_module) {
          net->zero_grad(/*set_to_none=*/false);
        } else {
          optimizer.zero_grad(/*set_to_none=*/false);
        }
        const Tensor x = parity::random({2, 6}, 10 * step + world.rank());
        ddp(x).square().sum().backward();
        const Tensor gradient = net->fc1->weight.grad();
        expect_same_on_all_ranks(world, gradient, std::to_string(step));
        if (step == 0) held = gradient;
        EXPECT_TRUE(held.equal(gradient)) << step;
        EXPECT_EQ(held.data_ptr(), gradient.data_ptr()) << step;
      }
    }
  });
}

TEST(Ddp, AGradientInUserMemoryGetsTheMean) {
  with_ddp<Mlp>(2, [](World& world, Mlp& net, auto& ddp) {
    Tensor& weight = net->fc1->weight;
    const Tensor memory = torch::zeros({weight.numel()}, weight.dtype());
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      memory.zero_();
      weight.mutable_grad() = memory.view(weight.sizes());
      const Tensor x = parity::random({2, 6}, 10 * step + world.rank());
      ddp(x).square().sum().backward();
      expect_same_on_all_ranks(world, memory, std::to_string(step));
      EXPECT_GT(memory.abs().max().item<double>(), 0) << step;
    }
  });
}

TEST(Ddp, AGradientWithAGraphKeepsIt) {
  with_ddp<Mlp>(2, [](World& world, Mlp& net, auto& ddp) {
    const Tensor x = parity::random({2, 6}, world.rank());
    ddp(x).square().sum().backward(
        {}, /*retain_graph=*/true, /*create_graph=*/true);
    for (const auto& parameter : net->parameters()) {
      EXPECT_TRUE(parameter.grad().requires_grad());
    }
  });
}

TEST(Ddp, SharedParametersAreReducedOnce) {
  with_ddp<Shared>(2, [](World& world, Shared& net, auto& ddp) {
    EXPECT_EQ(ddp.buckets().size(), 1u);
    EXPECT_EQ(ddp.buckets()[0].size(), 4u);  // in, out, one weight, one bias
  });
}

TEST(Ddp, EveryBucketIsInTheHistoryWithItsLabel) {
  with_ddp<Conv>(2, Plan().options, [](World& world, Conv& net, auto& ddp) {
    const auto steps = [&] { ddp(parity::random({2, 6}, 1)).sum().backward(); };
    steps();  // the buckets are rebuilt after the first
    const auto before = world.history().count();
    steps();
    std::set<std::string> labels;
    for (const auto& record : world.history().snapshot()) {
      if (record.operation == "all_reduce") labels.insert(record.label);
    }
    const size_t buckets = ddp.buckets().size();
    EXPECT_GE(buckets, 3u);
    EXPECT_EQ(world.history().count() - before, buckets);
    for (size_t i = 0; i < buckets; ++i) {
      EXPECT_EQ(labels.count("bucket " + std::to_string(i)), 1u) << i;
    }
  });
}

TEST(Ddp, AGroupOfOneSendsNothing) {
  const World world = World::alone();
  auto net = with_values(Mlp(), 3);
  DistributedDataParallel<Mlp> ddp(net, world.group());
  const auto guard = ddp.no_sync();
  ddp.global_mean(ddp(parity::random({2, 6}, 1)).sum(), 2).backward();
  int runs = 0;
  ddp.join([&] { ++runs; });
  EXPECT_EQ(runs, 1);
  EXPECT_TRUE(net->fc1->weight.grad().defined());
  EXPECT_EQ(world.history().count(), 0u);
}

TEST(Ddp, NoSyncSendsNothing) {
  with_ddp<Mlp>(2, [](World& world, Mlp& net, auto& ddp) {
    const Tensor x = parity::random({2, 6}, world.rank());
    const auto before = world.history().count();
    {
      const auto guard = ddp.no_sync();
      ddp(x).sum().backward();
      ddp(x).sum().backward();
    }
    EXPECT_EQ(world.history().count(), before);
    Tensor gradient = net->fc1->weight.grad().clone();
    world.group().broadcast(gradient, 0).wait();
    EXPECT_EQ(gradient.equal(net->fc1->weight.grad()), world.rank() == 0);
    const auto local = world.history().count();
    ddp(x).sum().backward();
    EXPECT_GT(world.history().count(), local);
  });
}

// -------------------------------------------------------- kinds of modules

struct TupleNet : torch::nn::Module {
  std::tuple<Tensor, std::vector<Tensor>> forward(const Tensor& x, int times) {
    std::vector<Tensor> outputs;
    for (int i = 0; i < times; ++i) outputs.push_back(fc(x) * i);
    return {fc(x), outputs};
  }
  torch::nn::Linear fc = register_module("fc", torch::nn::Linear(6, 4));
};

TEST(Ddp, WrapsReferencesSharedPointersHoldersAndSequentials) {
  run_ranks(2, [](World& world) {
    const Group& group = world.group();
    const Tensor x = parity::random({2, 6}, world.rank());
    TupleNet on_the_stack;
    parity::give_values(on_the_stack, 3);
    DistributedDataParallel by_reference(on_the_stack, group);
    auto [y, more] = by_reference(x, 2);
    (y.sum() + more[1].sum()).backward();
    expect_same_on_all_ranks(world, on_the_stack.fc->weight.grad());

    auto shared = std::make_shared<nets::MlpImpl>();
    parity::give_values(*shared, 3);
    DistributedDataParallel by_pointer(shared, group);
    by_pointer(x).sum().backward();
    expect_same_on_all_ranks(world, by_pointer->fc1->weight.grad());

    torch::nn::Sequential sequential(
        torch::nn::Linear(6, 3), torch::nn::Tanh(), torch::nn::Linear(3, 2));
    parity::give_values(*sequential, 3);
    DistributedDataParallel by_holder(sequential, group);
    by_holder(x).sum().backward();
    expect_same_on_all_ranks(world, by_holder->parameters()[0].grad());
  });
}

// ------------------------------------------------------------------- backward

// A penalty on the gradient of the input: autograd::grad reaches no parameter
// and must not reduce.
TEST(Ddp, GradientPenalty) {
  const auto loss_of = [](auto& net, const Tensor& input) {
    Tensor x = input.detach().requires_grad_();
    Tensor y = net(x);
    const Tensor gx = torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0];
    return y.square().mean() + gx.square().sum(1).mean();
  };
  const Tensor x = parity::random({4, 6}, 1);
  auto expected = with_values(Mlp(), 3);
  loss_of(expected, x).backward();
  with_ddp<Mlp>(2, [&](World& world, Mlp& net, auto& ddp) {
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      // fc3.bias has no part in the penalty, but in y.
      loss_of(ddp, x.narrow(0, 2 * world.rank(), 2)).backward();
      EXPECT_TRUE(torch::allclose(
          net->fc1->weight.grad(), expected->fc1->weight.grad(), 1e-11));
      EXPECT_TRUE(torch::allclose(
          net->fc3->bias.grad(), expected->fc3->bias.grad(), 1e-11));
    }
  });
}

// Two forwards, two backwards without zero_grad: gradients add up.
TEST(Ddp, SeveralBackwardsAddUp) {
  const Tensor x = parity::random({4, 6}, 1), z = parity::random({4, 6}, 2);
  auto expected = with_values(Mlp(), 3);
  (expected(x).square().mean() + expected(z).square().mean()).backward();
  with_ddp<Mlp>(2, [&](World& world, Mlp& net, auto& ddp) {
    const auto part = [&](const Tensor& t) {
      return t.narrow(0, 2 * world.rank(), 2);
    };
    const Tensor a = ddp(part(x)), b = ddp(part(z));
    a.square().mean().backward();
    b.square().mean().backward();
    EXPECT_TRUE(torch::allclose(
        net->fc1->weight.grad(), expected->fc1->weight.grad(), 1e-11));
  });
}

// The step after one that failed on every rank is not affected by it.
TEST(Ddp, RecoversFromAnExceptionInBackward) {
  with_ddp<Mlp>(2, Plan().options, [](World& world, Mlp& net, auto& ddp) {
    const Tensor x = parity::random({2, 6}, world.rank());
    {
      const Tensor h = torch::tanh(net->fc1(x));
      h.register_hook([](const Tensor& g) -> Tensor {
        throw std::runtime_error("planted");
      });
      EXPECT_THROW(net->fc3(net->fc2(h)).sum().backward(), std::runtime_error);
    }
    net->zero_grad();
    ddp(x).sum().backward();
    for (const auto& item : net->named_parameters()) {
      expect_same_on_all_ranks(world, item.value().grad(), item.key());
    }
  });
}

// An exception that leaves a rank while buckets are reduced is the job's error.
TEST(Ddp, ExceptionInBackwardEndsTheJob) {
  const auto error = error_text<Error>([] {
    with_ddp<Mlp>(2, {.in_place_bytes = 1}, [](World& world, Mlp&, auto& ddp) {
      Tensor x = parity::random({2, 6}, world.rank()).requires_grad_();
      const Tensor h = torch::tanh(x);
      if (world.rank() == 1) {
        h.register_hook([](const Tensor&) -> Tensor {
          throw std::runtime_error("planted");
        });
      }
      ddp(h).sum().backward();
      world.group().barrier();
    });
  });
  EXPECT_THAT(error, HasSubstr("rank 1: planted"));
}

TEST(Ddp, SparseGradientIsAnError) {
  const auto error = error_on(2, [](World& world) {
    torch::nn::Embedding net(torch::nn::EmbeddingOptions(5, 2).sparse(true));
    DistributedDataParallel<torch::nn::Embedding> ddp(net, world.group());
    ddp(torch::tensor({1, 2})).sum().backward();
  });
  EXPECT_THAT(error, HasSubstr("the gradient of \"weight\" is sparse"));
}

TEST(Ddp, ABatchWithoutSamplesIsAnError) {
  const auto error = error_text<DataError>([] {
    with_ddp<Mlp>(2, [](World& world, Mlp& net, auto& ddp) {
      ddp.global_mean(ddp(parity::random({0, 6}, 1)).sum(), 0);
    });
  });
  EXPECT_THAT(error, HasSubstr("at least one sample is needed"));
}

}  // namespace echelon::ddp_test
