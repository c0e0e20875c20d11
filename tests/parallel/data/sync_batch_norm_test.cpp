#include "echelon/parallel/data/sync_batch_norm.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <numeric>
#include <string>
#include <vector>

#include "echelon/comm/world.h"
#include "echelon/layers/channels_last.h"
#include "tests/parallel/data/nets.h"
#include "tests/support/error_text.h"
#include "tests/support/parity.h"
#include "tests/support/ranks.h"

namespace echelon::sync_batch_norm_test {

using testing::HasSubstr;
using torch::Tensor;
using torch::nn::BatchNorm1d;
using torch::nn::BatchNormOptions;

struct Case {
  std::string name;
  std::vector<int64_t> rest;  // of the shape, behind batch and 3 channels
  bool affine = true;
  std::optional<double> momentum = 0.1;
  torch::Dtype dtype = torch::kFloat64;
  bool channels_last = false;
};

void PrintTo(const Case& test, std::ostream* out) {
  *out << test.name;
}

BatchNormOptions options_of(const Case& test) {
  return BatchNormOptions(3).affine(test.affine).momentum(test.momentum);
}

// Batches of the ranks; of 3 and 4 ranks, one has none.
std::vector<int64_t> batches(int size) {
  const std::vector<int64_t> all = {4, 7, 0, 2};
  return {all.begin(), all.begin() + size};
}

class Sync : public testing::TestWithParam<std::tuple<Case, Ranks>> {};

template <class Norm>
void expect_close(const Norm& expected, const Norm& actual, double tolerance) {
  for (const auto& item : expected->named_buffers()) {
    EXPECT_TRUE(torch::allclose(
        item.value(), actual->named_buffers()[item.key()], tolerance,
        tolerance))
        << item.key();
  }
}

// Compares two steps of BatchNorm over the whole batch with SyncBatchNorm over
// shares of it: outputs, all gradients, running statistics, and evaluation
// after them.
TEST_P(Sync, IsBatchNormOverTheWholeBatch) {
  const auto& [test, ranks] = GetParam();
  ranks.run([&test = test](World& world) {
    const Group& group = world.group();
    const auto sizes = batches(world.size());
    const int64_t total =
        std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    const int64_t begin = std::accumulate(
        sizes.begin(), sizes.begin() + world.rank(), int64_t{0});
    const int64_t own = sizes[world.rank()];
    const double tolerance = test.dtype == torch::kFloat64 ? 1e-11 : 2e-5;

    std::vector<int64_t> shape = {total, 3};
    shape.insert(shape.end(), test.rest.begin(), test.rest.end());
    SyncBatchNorm whole(options_of(test), World::alone().group());
    SyncBatchNorm sync(options_of(test), group);
    for (auto* norm : {&whole, &sync}) {
      parity::give_values(**norm, 3);
      (*norm)->to(test.dtype);
    }
    for (int step = 0; step < 2; ++step) {
      // A mean far from zero and a scale for each channel.
      Tensor x = (parity::random(shape, step) * 3 + 5).to(test.dtype);
      if (test.channels_last) x = with_channels_last(x);
      const Tensor w = parity::random(shape, 10 + step).to(test.dtype);
      x.requires_grad_();
      Tensor part = x.detach().narrow(0, begin, own).clone().requires_grad_();
      whole->zero_grad();
      sync->zero_grad();
      const Tensor expected = whole(x);
      (expected * w).sum().backward();
      const Tensor actual = sync(part);
      if (test.channels_last && own > 0) {
        EXPECT_TRUE(actual.is_contiguous(torch::MemoryFormat::ChannelsLast));
        part.register_hook([](const Tensor& gradient) {
          EXPECT_TRUE(
              gradient.is_contiguous(torch::MemoryFormat::ChannelsLast));
        });
      }
      (actual * w.narrow(0, begin, own)).sum().backward();
      const auto close = [&](const Tensor& a, const Tensor& b) {
        return torch::allclose(a, b, tolerance, tolerance);
      };
      EXPECT_TRUE(close(actual, expected.narrow(0, begin, own)));
      EXPECT_TRUE(close(part.grad(), x.grad().narrow(0, begin, own)));
      if (test.affine) {
        for (const auto& name : {"weight", "bias"}) {
          Tensor sum = sync->named_parameters()[name].grad().clone();
          group.all_reduce(sum).wait();
          EXPECT_TRUE(close(sum, whole->named_parameters()[name].grad()))
              << name;
        }
      }
    }
    expect_close(whole, sync, tolerance);
    whole->eval();
    sync->eval();
    const auto before = world.history().count();
    const Tensor x = parity::random(shape, 9).to(test.dtype);
    EXPECT_TRUE(torch::allclose(whole(x), sync(x), tolerance, tolerance));
    EXPECT_EQ(world.history().count(), before);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, Sync,
    testing::Combine(
        testing::Values(
            Case{"flat", {}}, Case{"image", {2, 3}},
            Case{.name = "last", .rest = {2, 3}, .channels_last = true},
            Case{"volume", {2, 1, 2}}, Case{"not_affine", {4}, false},
            Case{"cumulative", {2}, true, std::nullopt},
            Case{"float32", {2, 3}, true, 0.1, torch::kFloat32}),
        testing::ValuesIn(ranks_of({1, 2, 3, 4}))),
    [](const auto& info) {
      return std::get<0>(info.param).name + "_" +
             testing::PrintToString(std::get<1>(info.param));
    });

// A module of one rank's own, normal or converted, on its part of a batch.
TEST(SyncBatchNorm, ConvertsMembersAndSequentialsOfAnyModule) {
  run_ranks(2, [](World& world) {
    const Group& group = world.group();
    nets::Norm whole, parts;
    for (auto* net : {&whole, &parts}) parity::give_values(**net, 3);
    const Tensor x = parity::random({6, 6}, 1);
    const int64_t begin = world.rank() * 2, own = world.rank() == 0 ? 2 : 4;
    const Tensor expected = whole(x).narrow(0, begin, own);
    {
      const auto converted = convert_sync_batch_norm(*parts, group);
      EXPECT_EQ(converted.size(), 2u);
      const Tensor actual = parts(x.narrow(0, begin, own));
      EXPECT_TRUE(torch::allclose(actual, expected, 1e-11));
      EXPECT_TRUE(torch::allclose(
          whole->norm->running_var, parts->norm->running_var, 1e-11));
      // In evaluation, one rank alone may call it.
      parts->eval();
      if (world.rank() == 0) parts(x);
      parts->train();
    }
    // The conversion ended with its result.
    const auto before = world.history().count();
    parts(x.narrow(0, begin, own));
    EXPECT_EQ(world.history().count(), before);
  });
}

// Momentum none: the plain mean of all batches' statistics.
TEST(SyncBatchNorm, CumulativeAverageIsThatOfTorch) {
  run_ranks(2, [](World& world) {
    const auto options = BatchNormOptions(3).momentum(std::nullopt);
    BatchNorm1d whole(options);
    SyncBatchNorm sync(options, world.group());
    for (int step = 0; step < 3; ++step) {
      const Tensor x = parity::random({8, 3}, step).to(torch::kFloat32);
      whole(x);
      sync(x.narrow(0, 4 * world.rank(), 4));
    }
    for (const auto& item : whole->named_buffers()) {
      EXPECT_TRUE(torch::allclose(
          item.value().to(torch::kFloat32),
          sync->named_buffers()[item.key()].to(torch::kFloat32), 1e-5, 1e-6))
          << item.key();
    }
  });
}

TEST(SyncBatchNorm, CallsOfOtherModulesAreNotChanged) {
  run_ranks(2, [](World& world) {
    BatchNorm1d converted(3), other(3);
    const auto conversion = convert_sync_batch_norm(*converted, world.group());
    const auto before = world.history().count();
    const Tensor x = parity::random({4, 3}, 1).to(torch::kFloat32);
    other(x);
    EXPECT_EQ(world.history().count(), before);
    converted(x);
    EXPECT_GT(world.history().count(), before);
  });
}

// Sums of squares would lose all digits of a variance of 1 beside a mean of
// 1e4.
TEST(SyncBatchNorm, KeepsItsDigitsFarFromZero) {
  run_ranks(2, [](World& world) {
    SyncBatchNorm norm(BatchNormOptions(3).momentum(1.0), world.group());
    const Tensor x = parity::random({500, 3}, world.rank()) + 1e4;
    norm(x.to(torch::kFloat32));
    Tensor both =
        torch::cat({parity::random({500, 3}, 0), parity::random({500, 3}, 1)});
    EXPECT_TRUE(torch::allclose(
        norm->running_var.to(torch::kFloat64), both.var(0), 1e-3));
  });
}

TEST(SyncBatchNorm, ErrorsSayWhatIsNeeded) {
  const auto message_of = [](const std::function<void(World&)>& body) {
    return error_text([&] { run_ranks(2, body); });
  };
  EXPECT_THAT(
      message_of([](World& world) {
        SyncBatchNorm norm(BatchNormOptions(3), world.group());
        norm(torch::ones({1 - world.rank(), 3}));
      }),
      HasSubstr("have 1 values per channel together"));
  EXPECT_THAT(
      message_of([](World& world) {
        SyncBatchNorm norm(BatchNormOptions(3), world.group());
        norm(torch::ones({4, 2}));
      }),
      HasSubstr("with C=3 channels is expected"));
  EXPECT_THAT(
      message_of([](World& world) {
        BatchNorm1d norm(
            BatchNormOptions(3).affine(false).track_running_stats(false));
        torch::nn::Sequential net(norm);
        const auto converted = convert_sync_batch_norm(*net, world.group());
      }),
      HasSubstr("\"0\" has neither running statistics nor a weight"));
  EXPECT_THAT(
      message_of([](World& world) {
        SyncBatchNorm norm(BatchNormOptions(3), world.group());
        Tensor x = torch::rand({4, 3}).requires_grad_();
        torch::autograd::grad(
            {norm(x).square().sum()}, {x}, {}, true, /*create_graph=*/true);
      }),
      HasSubstr("cannot be differentiated twice"));
}

// Parameters and activations in low precision, statistics in float32.
TEST(SyncBatchNorm, StatisticsOfLowPrecisionAreThoseOfFloat32) {
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    run_ranks(3, [&](World& world) {
      SyncBatchNorm norm(BatchNormOptions(3), world.group());
      SyncBatchNorm whole(BatchNormOptions(3), World::alone().group());
      for (auto* one : {&norm, &whole}) {
        for (auto& parameter : (*one)->parameters()) {
          parameter.set_data(torch::full({3}, 1.5, dtype));
        }
      }
      const auto all = (parity::random({30, 3, 20, 20}, 1) + 6).to(dtype);
      const auto cotangent = (parity::random({30, 3, 20, 20}, 2) + 1).to(dtype);
      const auto part = [&](const Tensor& x) {
        return x.narrow(0, 10 * world.rank(), 10);
      };
      for (const bool training : {true, false}) {
        norm->train(training);
        whole->train(training);
        const auto x = part(all).clone().requires_grad_();
        const auto wide = all.to(torch::kFloat32).requires_grad_();
        const auto y = norm->forward(x);
        const auto expected = whole->forward(wide);
        EXPECT_EQ(y.scalar_type(), dtype);
        const double tolerance = dtype == torch::kHalf ? 0x1p-10 : 0x1p-7;
        EXPECT_TRUE(torch::allclose(
            y.to(torch::kFloat32), part(expected), tolerance, tolerance));
        y.backward(part(cotangent));
        expected.backward(cotangent.to(torch::kFloat32));
        EXPECT_EQ(x.grad().scalar_type(), dtype);
        EXPECT_TRUE(torch::allclose(
            x.grad().to(torch::kFloat32), part(wide.grad()), tolerance,
            tolerance));
      }
      EXPECT_EQ(norm->running_var.scalar_type(), torch::kFloat32);
      expect_close(whole, norm, 1e-6);
    });
  }
}

}  // namespace echelon::sync_batch_norm_test
