#include "echelon/parallel/data/communication_hooks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "echelon/error.h"
#include "tests/parallel/data/training.h"

namespace echelon::communication_hooks_test {

using nets::Conv;
using nets::Mlp;
using torch::Tensor;
using training::Plan;
using training::with_values;

// The gradients of one backward of a Conv on this rank's samples, by name.
parity::Record
one_step(World& world, BucketHook hook, torch::Dtype dtype = torch::kFloat64) {
  auto net = with_values(Conv(), 3);
  net->to(dtype);
  auto options = Plan().options;
  options.hook = std::move(hook);
  DistributedDataParallel<Conv> ddp(net, world.group(), options);
  ddp(parity::random({4, 6}, world.rank()).to(dtype)).square().sum().backward();
  parity::Record record;
  record.step(*net, 0.0);
  return record;
}

void expect_same_on_all_ranks(World& world, const parity::Record& record) {
  for (const auto& [name, gradient] : record.gradients[0]) {
    training::expect_same_on_all_ranks(world, gradient, name);
  }
}

class Hooks : public testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(
    Ranks, Hooks, testing::ValuesIn(ranks_of({2, 3, 4})),
    testing::PrintToStringParamName());

// Each of N inputs and N - 1 sums is rounded once, by half of a unit in the
// last of 8 or 11 bits.
void expect_rounded(
    World& world, torch::Dtype dtype, const BucketHook& hook, int bits) {
  const auto expected = one_step(world, all_reduce_hook(), dtype);
  const auto actual = one_step(world, hook, dtype);
  parity::expect_parity(expected, actual, world.size() * std::pow(2.0, -bits));
  EXPECT_FALSE(actual.gradients[0]
                   .at("fc.weight")
                   .equal(expected.gradients[0].at("fc.weight")));
  expect_same_on_all_ranks(world, actual);
}

TEST_P(Hooks, HalfIsWithinItsRounding) {
  GetParam().run([](World& world) {
    expect_rounded(world, torch::kFloat64, bf16_hook(), 8);
    expect_rounded(world, torch::kFloat32, bf16_hook(), 8);
    expect_rounded(world, torch::kFloat64, fp16_hook(), 11);
  });
}

TEST(CommunicationHooks, HalfSendsHalfTheBytesOfFloat32) {
  run_ranks(2, [](World& world) {
    const auto bytes_of = [&](BucketHook hook) {
      const auto before = world.history().count();
      one_step(world, std::move(hook), torch::kFloat32);
      int64_t bytes = 0;
      const auto records = world.history().snapshot();
      for (size_t i = before; i < records.size(); ++i) {
        if (records[i].label.rfind("bucket ", 0) == 0 &&
            records[i].operation == "all_reduce") {
          bytes += records[i].bytes;
        }
      }
      return bytes;
    };
    const int64_t full = bytes_of(all_reduce_hook());
    EXPECT_GT(full, 0);
    EXPECT_EQ(bytes_of(bf16_hook()) * 2, full);
    EXPECT_EQ(bytes_of(fp16_hook()) * 2, full);
    EXPECT_LT(bytes_of(powersgd_hook({.start_iteration = 0})), full);
  });
}

// 40000 + 40000 is beyond float16, the mean is not.
TEST(CommunicationHooks, Fp16SumDoesNotOverflow) {
  run_ranks(2, [](World& world) {
    GradientBucket bucket;
    bucket.label = "bucket 0";
    bucket.divisor = 2;
    bucket.flat = torch::full({4}, 40000.0);
    fp16_hook()(bucket, world.group())();
    EXPECT_TRUE(bucket.flat.equal(torch::full({4}, 40000.0)));
  });
}

// A hook of the user: the largest absolute value wins. Its work is done when
// the completion is called, in order.
TEST(CommunicationHooks, HookOfAUser) {
  run_ranks(3, [](World& world) {
    std::vector<int64_t> started, completed;
    std::vector<std::string> names;
    bool last = false;
    auto net = with_values(Mlp(), 3);
    auto options = Plan().options;
    options.hook = [&](GradientBucket& bucket, const Group& group) {
      started.push_back(bucket.index);
      EXPECT_FALSE(last);
      last = bucket.last;
      EXPECT_EQ(bucket.names.size(), bucket.gradients.size());
      int64_t numel = 0;
      for (size_t i = 0; i < bucket.names.size(); ++i) {
        names.push_back(bucket.names[i]);
        numel += bucket.gradients[i].numel();
        EXPECT_TRUE(bucket.gradients[i].is_alias_of(bucket.flat));
      }
      EXPECT_EQ(numel, bucket.flat.numel());
      const Work work = group.all_reduce(
          bucket.flat, ReduceOp::max, {.label = bucket.label, .async = true});
      return [work, &bucket, &completed] {
        work.wait();
        completed.push_back(bucket.index);
      };
    };
    DistributedDataParallel<Mlp> ddp(net, world.group(), options);
    const Tensor x = torch::full({1, 6}, world.rank(), torch::kFloat64);
    net->fc1->forward(x);
    ddp(x).sum().backward();
    EXPECT_TRUE(last);
    EXPECT_EQ(names.size(), 6u);
    EXPECT_EQ(started, completed);
    // fc3.bias has gradient 1 on every rank, so mean and maximum are equal. The
    // maximum of fc1.weight is rank 2's gradient or 0, whatever the others
    // have.
    EXPECT_TRUE(net->fc3->bias.grad().equal(torch::ones({4}, torch::kFloat64)));
  });
}

// ----------------------------------------------------------------- PowerSGD

TEST_P(Hooks, PowerSgdIsExactAtFullRank) {
  GetParam().run([](World& world) {
    const auto expected = one_step(world, all_reduce_hook());
    const auto actual = one_step(
        world, powersgd_hook(
                   {.rank = 100, .start_iteration = 0, .min_compression = 0}));
    parity::expect_parity(expected, actual, 1e-11);
    expect_same_on_all_ranks(world, actual);
  });
}

TEST_P(Hooks, PowerSgdIsExactBeforeItsStart) {
  Plan plan;
  plan.steps = 3;
  const auto expected = training::on_one_device(with_values(Conv(), 3), plan);
  GetParam().run([&](World& world) {
    Plan own = plan;  // a hook has state: one per rank
    own.options.hook =
        powersgd_hook({.start_iteration = 3, .min_compression = 0});
    const auto actual = training::on_ranks(
        with_values(Conv(), 3 + world.rank()), world.group(), own);
    parity::expect_parity(expected, actual, parity::kRounding);
  });
}

// One matrix, the same gradient G_r in every step.
class Constant {
 public:
  Constant(World& world, const PowerSgdOptions& options)
      : world_(world),
        hook_(powersgd_hook(options)),
        own_(parity::random({12, 9}, 40 + world.rank())),
        mean_(own_.clone()) {
    world.group().all_reduce(mean_, ReduceOp::avg).wait();
  }

  Tensor step() {
    GradientBucket bucket;
    bucket.last = true;
    bucket.label = "bucket 0";
    bucket.names = {"weight"};
    bucket.divisor = world_.size();
    bucket.flat = own_.flatten().clone();
    bucket.gradients = {bucket.flat.view({12, 9})};
    hook_(bucket, world_.group())();
    return bucket.gradients[0];
  }

  double distance(const Tensor& estimate) const {
    return ((estimate - mean_).norm() / mean_.norm()).item<double>();
  }
  const Tensor& mean() const { return mean_; }

 private:
  World& world_;
  BucketHook hook_;
  Tensor own_, mean_;
};

// Later steps add what one step loses: the mean over many steps approaches the
// gradient. Without feedback it does not.
TEST(CommunicationHooks, PowerSgdErrorFeedbackLosesNothing) {
  run_ranks(2, [](World& world) {
    const auto mean_of_steps = [&](bool feedback) {
      PowerSgdOptions options{
          .rank = 2, .start_iteration = 0, .min_compression = 0};
      options.error_feedback = feedback;
      Constant constant(world, options);
      const Tensor first = constant.step();
      EXPECT_GT(constant.distance(first), 0.3);
      Tensor sum = first.clone();
      for (int i = 1; i < 100; ++i) sum += constant.step();
      return constant.distance(sum / 100);
    };
    EXPECT_LT(mean_of_steps(true), 0.05);
    EXPECT_GT(mean_of_steps(false), 0.3);
  });
}

// Without feedback, warm start is the power method: it finds the best
// approximation of the given rank.
TEST(CommunicationHooks, PowerSgdWarmStartFindsTheBestApproximation) {
  run_ranks(2, [](World& world) {
    const auto distance_after = [&](bool warm) {
      PowerSgdOptions options{
          .rank = 1, .start_iteration = 0, .min_compression = 0};
      options.error_feedback = false;
      options.warm_start = warm;
      Constant constant(world, options);
      Tensor last;
      for (int i = 0; i < 200; ++i) last = constant.step();
      const Tensor s = std::get<1>(torch::linalg_svd(constant.mean()));
      const double best = (s.narrow(0, 1, 8).norm() / s.norm()).item<double>();
      return constant.distance(last) - best;
    };
    EXPECT_LT(distance_after(true), 1e-6);
    EXPECT_GT(distance_after(false), 1e-3);
  });
}

TEST(CommunicationHooks, PowerSgdIsDeterministic) {
  std::vector<Tensor> runs;
  for (int i = 0; i < 2; ++i) {
    run_ranks(3, [&](World& world) {
      const auto record = one_step(
          world, powersgd_hook({.start_iteration = 0, .min_compression = 0}));
      expect_same_on_all_ranks(world, record);
      if (world.rank() == 0) {
        runs.push_back(record.gradients[0].at("fc.weight"));
      }
    });
  }
  EXPECT_TRUE(runs[0].equal(runs[1]));
}

// Rank-1 gradients train nearly as well as exact ones.
TEST(CommunicationHooks, PowerSgdConverges) {
  const auto final_loss = [](bool compressed) {
    double loss = 0;
    run_ranks(2, [&](World& world) {
      auto net = with_values(Mlp(), 3);
      auto options = Plan().options;
      if (compressed) {
        options.hook =
            powersgd_hook({.start_iteration = 2, .min_compression = 0});
      }
      DistributedDataParallel<Mlp> ddp(net, world.group(), options);
      torch::optim::SGD optimizer(
          net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
      const Tensor x = parity::random({16, 6}, 60 + world.rank());
      const Tensor y = x.narrow(1, 0, 4) - 0.5 * x.narrow(1, 2, 4);
      for (int step = 0; step < 300; ++step) {
        optimizer.zero_grad();
        const Tensor mean = (ddp(x) - y).square().mean();
        mean.backward();
        optimizer.step();
        if (world.rank() == 0) loss = mean.item<double>();
      }
    });
    return loss;
  };
  const double exact = final_loss(false);
  const double compressed = final_loss(true);
  EXPECT_LT(exact, 0.02);
  EXPECT_LT(compressed, 0.02);
  EXPECT_NE(exact, compressed);
}

TEST(CommunicationHooks, PowerSgdRankIsChecked) {
  EXPECT_THROW(powersgd_hook({.rank = 0}), ConfigError);
}

}  // namespace echelon::communication_hooks_test
