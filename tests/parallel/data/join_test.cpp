// Ranks that run out of data before the others.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <vector>

#include "echelon/error.h"
#include "tests/parallel/data/training.h"
#include "tests/support/error_text.h"

namespace echelon::join_test {

using nets::Mlp;
using nets::Norm;
using testing::HasSubstr;
using torch::Tensor;
using training::loss_sum;
using training::with_values;

constexpr int64_t kSamples = 3;  // of a rank's batch

struct Loop {
  std::vector<int> batches;  // of each rank
  JoinOptions options;
  bool global_mean = false;  // else the mean of the rank's batch
  bool accumulate = false;   // two backwards a step, the first without sync
  DistributedDataParallelOptions ddp = training::Plan().options;
};

Tensor input(int iteration, int rank) {
  return parity::random({kSamples, 6}, 100 * iteration + rank);
}

Tensor target(int iteration, int rank) {
  return parity::random({kSamples, 4}, 7000 + 100 * iteration + rank);
}

// One device computes what the ranks compute together.
Mlp on_one_device(const Loop& loop) {
  auto net = with_values(Mlp(), 3);
  auto optimizer = training::optimizer_of(*net);
  const int size = static_cast<int>(loop.batches.size());
  const int last = *std::max_element(loop.batches.begin(), loop.batches.end());
  for (int i = 0; i < last; ++i) {
    std::vector<int> active;
    for (int rank = 0; rank < size; ++rank) {
      if (loop.batches[rank] > i) active.push_back(rank);
    }
    const double ranks =
        loop.options.divide_by_initial_size && !loop.global_mean
            ? size
            : active.size();
    optimizer.zero_grad();
    for (const int rank : active) {
      const int backwards = loop.accumulate ? 2 : 1;
      for (int b = 0; b < backwards; ++b) {
        (loss_sum(net(input(i, rank)), target(i, rank)) / (kSamples * ranks))
            .backward();
      }
    }
    optimizer.step();
  }
  return net;
}

void run(const Loop& loop, World& world, Mlp net) {
  DistributedDataParallel<Mlp> ddp(net, world.group(), loop.ddp);
  auto optimizer = training::optimizer_of(*net);
  const auto backward = [&](int i) {
    const Tensor sum =
        loss_sum(ddp(input(i, world.rank())), target(i, world.rank()));
    const Tensor loss = loop.global_mean ? ddp.global_mean(sum, kSamples)
                                         : sum / static_cast<double>(kSamples);
    loss.backward();
  };
  ddp.join(
      [&] {
        for (int i = 0; i < loop.batches[world.rank()]; ++i) {
          optimizer.zero_grad();
          if (loop.accumulate) {
            const auto guard = ddp.no_sync();
            backward(i);
          }
          backward(i);
          optimizer.step();
        }
      },
      loop.options);
}

class Join : public testing::TestWithParam<BackendKind> {};
INSTANTIATE_TEST_SUITE_P(
    Backends, Join, testing::Values(BackendKind::local, BackendKind::gloo),
    [](const auto& info) {
      return info.param == BackendKind::local ? "local" : "gloo";
    });

void expect_parity(const Loop& loop, BackendKind backend) {
  const auto expected = on_one_device(loop);
  const Ranks ranks{static_cast<int>(loop.batches.size()), backend};
  ranks.run([&](World& world) {
    auto net = with_values(Mlp(), 3 + world.rank());
    run(loop, world, net);
    SCOPED_TRACE("rank " + std::to_string(world.rank()));
    for (const auto& item : expected->named_parameters()) {
      EXPECT_TRUE(torch::allclose(
          item.value(), net->named_parameters()[item.key()], 1e-11, 1e-12))
          << item.key();
    }
  });
}

TEST_P(Join, DividesByTheInitialSize) {
  expect_parity({.batches = {3, 1, 4, 2}}, GetParam());
  expect_parity({.batches = {5, 2}}, GetParam());
}

TEST_P(Join, DividesByTheRanksThatHaveData) {
  Loop loop{.batches = {3, 1, 4}};
  loop.options.divide_by_initial_size = false;
  expect_parity(loop, GetParam());
}

TEST_P(Join, GlobalMeanCountsTheSamplesOfActiveRanks) {
  Loop loop{.batches = {1, 3, 2}, .global_mean = true};
  expect_parity(loop, GetParam());
  loop.options.divide_by_initial_size = false;
  expect_parity(loop, GetParam());
}

// The first backward, which orders the buckets, without rank 0.
TEST_P(Join, RankWithoutAnyBatch) {
  expect_parity({.batches = {0, 2, 1}}, GetParam());
  expect_parity({.batches = {2, 0}}, GetParam());
  expect_parity({.batches = {0, 0}}, GetParam());
}

TEST_P(Join, Accumulation) {
  expect_parity({.batches = {3, 1}, .accumulate = true}, GetParam());
}

TEST_P(Join, UnusedParametersOfAJoinedRank) {
  Loop loop{.batches = {1, 3}};
  loop.ddp.find_unused_parameters = true;
  expect_parity(loop, GetParam());
}

TEST_P(Join, EqualNumbersOfBatches) {
  expect_parity({.batches = {2, 2, 2}}, GetParam());
}

TEST_P(Join, BuffersComeFromARankThatHasData) {
  Ranks{3, GetParam()}.run([](World& world) {
    auto net = with_values(Norm(), 3);
    DistributedDataParallel<Norm> ddp(net, world.group());
    const int batches = world.rank() + 1;
    ddp.join([&] {
      for (int i = 0; i < batches; ++i) {
        net->zero_grad();
        ddp(input(i, world.rank())).sum().backward();
      }
    });
    // Three forwards: rank 2's counter is the one that reached 3.
    EXPECT_EQ(net->norm->num_batches_tracked.item<int64_t>(), 3);
  });
}

TEST_P(Join, CompressionHookOfAJoinedRank) {
  Ranks{2, GetParam()}.run([](World& world) {
    Loop loop{.batches = {1, 3}};
    loop.ddp.hook = powersgd_hook({.start_iteration = 1, .min_compression = 0});
    auto net = with_values(Mlp(), 3);
    run(loop, world, net);
    training::expect_same_on_all_ranks(world, net->fc1->weight);
  });
}

TEST_P(Join, CanThrowAtTheFirstEnd) {
  Loop loop{.batches = {2, 1, 2}};
  loop.options.throw_on_early_termination = true;
  std::atomic<int> thrown = 0;
  Ranks{3, GetParam()}.run([&](World& world) {
    auto net = with_values(Mlp(), 3);
    try {
      run(loop, world, net);
    } catch (const DataError& error) {
      EXPECT_THAT(
          std::string(error.what()), HasAll(
                                         "rank 1 of axis world ran out of data",
                                         "throw_on_early_termination"));
      ++thrown;
    }
  });
  EXPECT_EQ(thrown, 3);
}

TEST_P(Join, DifferentCallsInOneIterationAreAnError) {
  const auto message = error_text<CommError>([] {
    Ranks{2, GetParam()}.run([](World& world) {
      auto net = with_values(Mlp(), 3);
      DistributedDataParallel<Mlp> ddp(net, world.group());
      ddp.join([&] {
        const Tensor sum = ddp(input(0, 0)).sum();
        (world.rank() == 0 ? ddp.global_mean(sum, 3) : sum).backward();
      });
    });
  });
  EXPECT_THAT(message, HasSubstr("do different things in one iteration"));
}

TEST_P(Join, ExceptionsOfTheBodyPassThrough) {
  Ranks{2, GetParam()}.run([](World& world) {
    auto net = with_values(Mlp(), 3);
    DistributedDataParallel<Mlp> ddp(net, world.group());
    EXPECT_THROW(
        ddp.join([] { throw std::out_of_range("mine"); }), std::out_of_range);
    // The wrapper is as before.
    ddp(input(0, world.rank())).sum().backward();
  });
}

}  // namespace echelon::join_test
