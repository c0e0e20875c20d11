#include "echelon/comm/world.h"

#include <gmock/gmock.h>
#include <sched.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <atomic>
#include <thread>

#include "echelon/comm/observer.h"
#include "echelon/comm/store/store.h"
#include "echelon/error.h"
#include "tests/support/error_text.h"

namespace echelon::world_test {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

TEST(World, AloneIsAWorldOfOne) {
  World world = World::alone();
  EXPECT_EQ(world.size(), 1);
  EXPECT_EQ(world.group().size(), 1);
  torch::Tensor tensor = torch::ones({3});
  world.group().all_reduce(tensor);
  EXPECT_EQ(tensor.sum().item<float>(), 3);
  EXPECT_THAT(world.exchange("x"), testing::ElementsAre("x"));
}

TEST(World, ComputesOnTheCoresThatItMayUse) {
  cpu_set_t before, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  CPU_ZERO(&one);
  for (size_t core = 0; CPU_COUNT(&one) == 0; ++core) {
    if (CPU_ISSET(core, &before)) CPU_SET(core, &one);
  }
  const auto threads = [] {
    std::atomic<int> most = 0;
    run_ranks(1, [&](World& world) { most = world.compute_threads(); });
    return most.load();
  };
  EXPECT_GE(threads(), 1);
  EXPECT_LE(threads(), CPU_COUNT(&before));
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  EXPECT_EQ(threads(), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
}

// A rank whose device failed did not fail because a peer had not called.
TEST(Observer, TellsAFailedDeviceFromALostPeer) {
  Observer observer(
      0, make_store_board(c10::make_intrusive<c10d::HashStore>()));
  const ObservedGroup group{.axis = "dp", .ranks = {0, 1}};
  const auto failed = [&](const std::exception_ptr& cause) {
    ObservedCall call;
    call.record = {
        .operation = "all_reduce", .axis = "dp", .label = "bucket 0"};
    call.group = &group;
    observer.begin(call);
    ObservedCalls calls({call});
    return observer.fail(calls, cause);
  };
  const auto device_error = error_text<DeviceError>([&] {
    std::rethrow_exception(failed(std::make_exception_ptr(c10::AcceleratorError(
        {__func__, __FILE__, __LINE__}, 700, "CUDA error: ECC"))));
  });
  EXPECT_THAT(
      device_error,
      AllOf(
          HasSubstr("all_reduce \"bucket 0\""), HasSubstr("CUDA error: ECC")));
  EXPECT_THAT(device_error, Not(HasSubstr("rank 1")));
  const auto comm_error = error_text<CommError>([&] {
    std::rethrow_exception(
        failed(std::make_exception_ptr(std::runtime_error("timed out"))));
  });
  EXPECT_THAT(comm_error, AllOf(HasSubstr("timed out"), HasSubstr("rank 1")));
}

TEST(Group, SilentGroupsLeaveOutputsUnchanged) {
  const Group group = Group::silent("tp", 2, 3);
  EXPECT_EQ(group.rank(), 2);
  EXPECT_EQ(group.size(), 3);
  torch::Tensor tensor = torch::ones({3});
  group.all_reduce(tensor).wait();
  EXPECT_EQ(tensor.sum().item<float>(), 3);
  torch::Tensor all = torch::full({9}, 7.0f);
  group.all_gather(all, tensor).wait();
  group.all_gather({all}, {tensor}).wait();
  group.reduce_scatter(tensor, all).wait();
  group.broadcast(tensor, 0).wait();
  group.barrier();
  EXPECT_EQ(all.sum().item<float>(), 63);
  EXPECT_EQ(tensor.sum().item<float>(), 3);
  EXPECT_THROW(group.all_gather(tensor, all), ConfigError);
}

TEST(Group, OnlyNcclRegistersMemory) {
  for (const auto backend : {BackendKind::local, BackendKind::gloo}) {
    run_ranks(
        2,
        [&](World& world) {
          EXPECT_EQ(
              world.group().why_not_registered(),
              "the backend \"" + world.backend() +
                  "\" registers no memory; NCCL does");
          EXPECT_THAT(
              error_text<ConfigError>(
                  [&] { world.group().allocate_registered(8); }),
              HasAll("allocate_registered on axis world of 2 ranks", "no "));
        },
        {.backend = backend});
  }
  for (const auto& group : {Group::alone("dp"), Group::silent("dp", 0, 2)}) {
    EXPECT_THAT(group.why_not_registered(), HasSubstr("sends nothing"));
    EXPECT_THAT(
        error_text<ConfigError>([&] { group.allocate_registered(8); }),
        HasSubstr("no memory is registered"));
  }
}

TEST(World, ExchangesValuesByRank) {
  run_ranks(3, [](World& world) {
    for (int round = 0; round < 3; ++round) {
      const auto values = world.exchange(
          std::to_string(round) + "/" + std::to_string(world.rank()));
      ASSERT_EQ(values.size(), 3u);
      EXPECT_EQ(values[2], std::to_string(round) + "/2");
    }
  });
}

TEST(World, GathersLargeValuesOnRankZero) {
  const auto value = [](int rank) {
    const size_t mib = size_t{1} << 20;
    const size_t sizes[] = {3, 0, 4 * mib, 9 * mib + 1};
    return std::string(sizes[rank], static_cast<char>('a' + rank));
  };
  run_ranks(4, [&](World& world) {
    for (int round = 0; round < 2; ++round) {
      const auto gathered = world.gather(value(world.rank()));
      ASSERT_EQ(gathered.size(), world.rank() == 0 ? 4u : 0u);
      for (size_t rank = 0; rank < gathered.size(); ++rank) {
        EXPECT_TRUE(gathered[rank] == value(static_cast<int>(rank)));
      }
    }
  });
}

TEST(RunRanks, TheFirstErrorIsRethrownWithItsRank) {
  const auto body = [](World& world) {
    if (world.rank() == 1) throw DataError("cat.jpg: broken");
    torch::Tensor tensor = torch::ones({1});
    if (world.rank() == 7) world.group().all_reduce(tensor);
  };
  EXPECT_EQ(
      error_text<DataError>(
          [&] { run_ranks(3, body, {.timeout = std::chrono::seconds(20)}); }),
      "rank 1: cat.jpg: broken");
}

class Hang : public testing::TestWithParam<BackendKind> {};

TEST_P(Hang, EveryRankReportsMissingRanksAndTheirLastCalls) {
  std::atomic<int> told{0};
  const auto body = [&](World& world) {
    const Group& group = world.group();
    torch::Tensor tensor = torch::ones({8});
    group.all_reduce(tensor, ReduceOp::sum, {.label = "layer3"});
    if (world.rank() == 2) {
      while (told < 2) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      return;
    }
    EXPECT_THAT(
        error_text<CommError>([&] {
          group.all_reduce(tensor, ReduceOp::sum, {.label = "bucket 0"});
        }),
        HasAll(
            "rank 2 last finished all_reduce \"layer3\" (#0) and has "
            "not called all_reduce \"bucket 0\" (#1) for 2",
            "axis world, float32 [8]", "arrived: rank 0, 1"));
    ++told;
  };
  EXPECT_NO_THROW(run_ranks(
      3, body, {.backend = GetParam(), .timeout = std::chrono::seconds(2)}));
}

TEST_P(Hang, DifferentCallsAreReported) {
  const auto body = [](World& world) {
    const Group& group = world.group();
    const bool first = world.rank() == 0;
    const auto error_of = [&](const torch::Tensor& tensor) {
      return error_text<CommError>([&] { group.all_reduce(tensor); });
    };
    EXPECT_THAT(
        error_of(first ? torch::ones({2, 3}) : torch::ones({3, 2})),
        AllOf(HasSubstr("[2, 3]"), HasSubstr("[3, 2]")));
    EXPECT_THAT(
        error_of(torch::ones({4}, first ? torch::kFloat32 : torch::kFloat64)),
        AllOf(HasSubstr("float32"), HasSubstr("float64")));
    torch::Tensor tensor = torch::ones({4});
    EXPECT_THAT(
        first ? error_of(tensor)
              : error_text<CommError>([&] { group.broadcast(tensor, 0); }),
        AllOf(HasSubstr("all_reduce"), HasSubstr("broadcast")));
    // Nothing but the label tells two calls in the opposite order.
    EXPECT_THAT(
        error_text<CommError>([&] {
          group.all_reduce(
              tensor, ReduceOp::sum, {.label = first ? "first" : "second"});
        }),
        AllOf(HasSubstr("all_reduce \"first\""), HasSubstr("\"second\"")));
    EXPECT_THAT(
        error_text<CommError>([&] {
          group.all_reduce(tensor, first ? ReduceOp::sum : ReduceOp::max);
        }),
        AllOf(HasSubstr("sum"), HasSubstr("max")));
    tensor.fill_(1);
    group.all_reduce(tensor);
    EXPECT_EQ(tensor[0].item<float>(), 2);
  };
  run_ranks(
      2, body,
      {.backend = GetParam(),
       .timeout = std::chrono::seconds(30),
       .check_collectives = true});
}

INSTANTIATE_TEST_SUITE_P(
    Backends, Hang, testing::Values(BackendKind::local, BackendKind::gloo),
    [](const auto& info) {
      return info.param == BackendKind::gloo ? "gloo" : "local";
    });

}  // namespace echelon::world_test
