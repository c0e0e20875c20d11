// Worlds and groups of ranks that have a device each, with NCCL's manners.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <c10/core/Event.h>

#include <algorithm>
#include <atomic>
#include <latch>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "echelon/comm/mesh_groups.h"
#include "echelon/comm/world.h"
#include "echelon/error.h"
#include "echelon/parallel/pipeline/pipeline.h"
#include "echelon/parallel/tensor/token_rows.h"
#include "echelon/schedule/options.h"
#include "tests/support/error_text.h"
#include "tests/test_device/places.h"

namespace echelon::communicators_test {

using namespace test_device;
using testing::ElementsAre;
using testing::HasSubstr;

CommOptions
on_device(std::chrono::milliseconds timeout = std::chrono::minutes(2)) {
  return {.device = DeviceKind::test, .timeout = timeout};
}

class Communicators : public testing::Test {
 protected:
  void SetUp() override { reset_calls(); }
  void TearDown() override {
    reset_calls();
    for (int index = 0; index < 4; ++index) {
      drain(index);
      clear_error(index);
    }
  }

  /// The calls of the rank's device from the first `from` on.
  static std::vector<std::string>
  calls_from(int rank, const std::string& from) {
    auto all = calls(rank);
    all.erase(all.begin(), std::find(all.begin(), all.end(), from));
    return all;
  }
  static int64_t count(int rank, const std::string& end) {
    const auto all = calls(rank);
    return std::count_if(all.begin(), all.end(), [&](const auto& call) {
      return call.ends_with(end);
    });
  }
};

bool all_ended(World& world) {
  const auto records = world.history().snapshot();
  return std::all_of(records.begin(), records.end(), [](const auto& record) {
    return record.end_ns != 0 && !record.failed;
  });
}

/// The observer asks the device now and then.
bool all_end(World& world) {
  for (int i = 0; i < 1000 && !all_ended(world); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return all_ended(world);
}

torch::Tensor filled(std::vector<int64_t> sizes, double value, World& world) {
  return torch::full(
      sizes, value, torch::dtype(torch::kFloat).device(world.device()));
}

bool holds(const torch::Tensor& tensor, std::vector<float> values) {
  return tensor.cpu().equal(torch::tensor(values));
}

TEST_F(Communicators, EachRankHasItsOwn) {
  run_ranks(
      3,
      [](World& world) {
        EXPECT_EQ(world.backend(), "nccl");
        EXPECT_EQ(world.device().index(), world.rank());
      },
      on_device());
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(calls(rank).at(0), "set_device");
  }
}

TEST_F(Communicators, OneRankAloneHasTheFirst) {
  const World world = World::alone(on_device());
  EXPECT_EQ(world.backend(), "nccl");
  EXPECT_EQ(world.device().index(), 0);
  EXPECT_THAT(calls(0), ElementsAre("set_device"));
}

TEST_F(Communicators, MoreRanksThanDevicesAreRefused) {
  EXPECT_THROW(
      run_ranks(
          options().num_devices + 1, [](World&) {}, on_device()),
      ConfigError);
}

TEST_F(Communicators, OptionsThatContradictEachOtherAreRefused) {
  EXPECT_THROW(
      World::alone({.device = DeviceKind::cpu, .backend = BackendKind::nccl}),
      ConfigError);
  EXPECT_THROW(
      run_ranks(
          2, [](World&) {},
          {.device = DeviceKind::test, .backend = BackendKind::gloo}),
      ConfigError);
}

// Limits for messages do not slow the collectives of the same ranks.
TEST_F(Communicators, GroupsForMessagesHaveOneOfFewBlocks) {
  const std::string few = "make 2 ranks of few blocks";
  run_ranks(
      2,
      [&](World& world) {
        const Group sums = world.new_group("dp", {0, 1});
        EXPECT_EQ(count(world.rank(), few), 0);
        const MeshGroups mesh(world, {.pp = 2});
        EXPECT_EQ(count(world.rank(), few), 1);
        const Group more =
            world.new_group("more", {0, 1}, std::nullopt, Traffic::messages);
        EXPECT_EQ(count(world.rank(), few), 1);

        const auto& pipeline = mesh.along(Axis::pp);
        const auto message = filled({2}, world.rank(), world);
        world.rank() == 0 ? pipeline.send(message, 1)
                          : pipeline.recv(message, 0);
        EXPECT_TRUE(holds(message, {0, 0}));
        const auto sum = filled({1}, 1, world);
        sums.all_reduce(sum);
        EXPECT_TRUE(holds(sum, {2}));
      },
      on_device());
}

TEST_F(Communicators, GroupsOfOtherAxesHaveNoLimit) {
  run_ranks(
      2,
      [](World& world) {
        const MeshGroups mesh(world, {.tp = 2});
        EXPECT_EQ(count(world.rank(), "few blocks"), 0);
      },
      on_device());
}

// ------------------------------------------------- calls that are over at once

TEST_F(Communicators, CallsWithoutWorkAreOver) {
  run_ranks(
      2,
      [](World& world) {
        const auto& group = world.group();
        const auto sum = filled({3}, 1 + world.rank(), world);
        group.all_reduce(sum);
        EXPECT_TRUE(holds(sum, {3, 3, 3}));
        const auto mean = filled({2}, 2 * world.rank(), world);
        group.all_reduce(mean, ReduceOp::avg);
        EXPECT_TRUE(holds(mean, {1, 1}));
        const auto all = filled({2}, -1, world);
        group.all_gather(all, filled({1}, world.rank(), world));
        EXPECT_TRUE(holds(all, {0, 1}));
        const auto one = filled({1}, world.rank(), world);
        group.broadcast(one, 1);
        EXPECT_TRUE(holds(one, {1}));
        group.barrier();
        EXPECT_TRUE(all_end(world));
        world.exchange("");
        hold(true);
        Work work = group.all_reduce(sum, ReduceOp::sum, {.async = true});
        work.wait();  // of the stream, not of the host
        EXPECT_FALSE(all_ended(world));
        world.exchange("");
        hold(false);
        EXPECT_TRUE(holds(sum, {6, 6, 6}));
        EXPECT_TRUE(all_end(world));
      },
      on_device());
}

TEST_F(Communicators, MessagesOfABatchStartTogether) {
  run_ranks(
      3,
      [](World& world) {
        const int next = (world.rank() + 1) % 3,
                  previous = (world.rank() + 2) % 3;
        const auto mine = filled({2}, world.rank(), world);
        const auto theirs = torch::empty_like(mine);
        world.group().batch_send_recv(
            {{.tensor = mine, .peer = next},
             {.send = false, .tensor = theirs, .peer = previous}});
        const auto expected = static_cast<float>(previous);
        EXPECT_TRUE(holds(theirs, {expected, expected}));
        world.group().barrier();
        EXPECT_TRUE(all_end(world));
        EXPECT_EQ(world.history().count(), 3u);
      },
      on_device());
  EXPECT_THAT(
      calls_from(0, "0 start"), ElementsAre(
                                    "0 start", "0 send 1", "0 recv 2", "0 end",
                                    "0 barrier", "synchronize", "0 shutdown"));
}

// NCCL has no tags; ranks may list a batch's messages in any order all the
// same.
TEST_F(Communicators, MessagesOfABatchMeetByTheirTags) {
  run_ranks(
      2,
      [](World& world) {
        const int peer = 1 - world.rank();
        const auto one = filled({3}, 1, world), two = filled({3}, 2, world);
        const auto got_one = filled({3}, 0, world);
        const auto got_two = filled({3}, 0, world);
        world.group().batch_send_recv(
            {{true, two, peer, 2},
             {true, one, peer, 1},
             {false, got_one, peer, 1},
             {false, got_two, peer, 2}});
        EXPECT_TRUE(holds(got_one, {1, 1, 1}));
        EXPECT_TRUE(holds(got_two, {2, 2, 2}));
      },
      on_device());
}

TEST_F(Communicators, ABatchThatThrowsIsClosed) {
  run_ranks(
      2,
      [](World& world) {
        const auto tensor = filled({1}, 1, world);
        const int peer = 1 - world.rank();
        EXPECT_THROW(
            world.group().batch_send_recv(
                {{.tensor = tensor, .peer = peer, .tag = kBrokenTag}}),
            CommError);
        world.group().barrier();
      },
      on_device());
  EXPECT_THAT(
      calls_from(0, "0 start"), ElementsAre(
                                    "0 start", "0 send 1", "0 end", "0 barrier",
                                    "synchronize", "0 shutdown"));
}

// ------------------------------------------------------------ communicators

TEST_F(Communicators, ASetOfRanksHasOneCommunicatorThatIsConnected) {
  run_ranks(
      4,
      [](World& world) {
        const MeshGroups groups(
            world, Layout{.dp_replicate = 2, .dp_shard = 2});
        EXPECT_EQ(groups.data().size(), 4);
        EXPECT_EQ(groups.along(Axis::dp_shard).size(), 2);
        const auto one = filled({1}, 1, world);
        groups.data().all_reduce(one);
        EXPECT_TRUE(holds(one, {4}));
      },
      on_device());
  EXPECT_THAT(
      calls(3), ElementsAre(
                    "set_device", "0 made", "0 barrier", "1 made", "1 barrier",
                    "2 made", "2 barrier", "0 all_reduce", "synchronize",
                    "0 shutdown", "1 shutdown", "2 shutdown"));
}

// A pair's first message holds its hosts up. Posted as they are needed, those
// of an interleaved pipeline wait for each other in a ring.
TEST_F(Communicators, PairsOfAPipelineConnectBeforeItRuns) {
  run_ranks(
      3,
      [](World& world) {
        LayerList layers;
        for (int i = 0; i < 6; ++i) {
          layers.add("fc" + std::to_string(i), [device = world.device()] {
            torch::nn::Linear layer(4, 4);
            layer->to(device);
            return layer;
          });
        }
        const auto schedule = make_schedule(
            {.kind = ScheduleKind::interleaved, .ranks = 3, .microbatches = 6});
        const auto boundaries = partition_evenly(layers, schedule.num_stages());
        Pipeline pipeline(
            world.group(), schedule,
            build_stages(
                layers, boundaries, schedule.rank_of_stage, world.rank(),
                /*seed=*/1),
            {.device = world.device()});
        EXPECT_EQ(
            count(world.rank(), "connected 0") +
                count(world.rank(), "connected 1") +
                count(world.rank(), "connected 2"),
            2);
        std::vector<Tensors> microbatches;
        for (int i = 0; i < 6 && pipeline.has_first_stage(); ++i) {
          microbatches.push_back({filled({2, 4}, 1, world)});
        }
        const auto result = pipeline.step(
            microbatches,
            [](const Tensors& outputs, int64_t) { return outputs[0].sum(); });
        EXPECT_EQ(result.losses.size(), pipeline.has_last_stage() ? 6u : 0u);
      },
      on_device(std::chrono::seconds(20)));
  EXPECT_EQ(count(0, "start"), 0);
}

// ------------------------------------------------------------------- the end

TEST_F(Communicators, AnErrorAbortsTheCommunicatorsOfAllRanks) {
  EXPECT_THROW(
      run_ranks(
          2,
          [](World& world) {
            if (world.rank() == 1) throw DataError("cat.jpg: broken");
          },
          on_device()),
      DataError);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(count(rank, "abort"), 1);
    EXPECT_EQ(count(rank, "shutdown"), 0);
  }
}

TEST_F(Communicators, ACallThatTheDeviceNeverEndsIsReported) {
  // The first rank that fails ends the others: their calls are over then.
  std::atomic<bool> failed{false};
  const auto message = error_text<CommError>([&] {
    run_ranks(
        2,
        [&](World& world) {
          const auto tensor = filled({1}, 1, world);
          hold(true);
          const Call call{.label = "bucket 7", .async = true};
          world.group().all_reduce(tensor, ReduceOp::sum, call).wait();
          while (!failed) {
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            if (world.history().snapshot().back().failed) failed = true;
          }
          world.group().barrier();
        },
        on_device(std::chrono::milliseconds(500)));
  });
  EXPECT_THAT(message, HasSubstr("all_reduce \"bucket 7\""));
}

// ------------------------------------------- collectives of matmuls in chunks

// Whether the device has done what its current stream has been given so far.
bool is_done_soon(torch::Device device) {
  c10::Event event(device.type());
  event.record(guard().getStream(device));
  for (int i = 0; i < 1000 && !event.query(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return event.query();
}

// Rank 1 sends its second chunk when rank 0 has used the first one.
TEST_F(Communicators, AProductWaitsForNoLaterChunk) {
  std::latch used(1);
  run_ranks(
      2,
      [&](World& world) {
        const TensorParallel parallel{
            world.group(), {.sequence_parallel = true, .overlap_chunks = 2}};
        const detail::TokenChunks chunks(8, parallel, parallel.chunks());
        const auto mine = filled({4, 3}, 1 + world.rank(), world);
        if (world.rank() == 1) {
          for (int chunk = 0; chunk < 2; ++chunk) {
            if (chunk == 1) used.wait();
            const auto all = filled({4, 3}, 0, world);
            world.group().all_gather(all, mine.slice(0, 0, 2));
          }
          return;
        }
        detail::TokenGather gather(mine, chunks, parallel, "tokens");
        const auto sum = filled({2, 2, 3}, 0, world);
        bool first = true;
        gather.for_each([&](const torch::Tensor& rows, const auto&) {
          sum.add_(rows);
          if (!std::exchange(first, false)) return;
          EXPECT_TRUE(is_done_soon(world.device()));
          used.count_down();
        });
        EXPECT_TRUE(holds(sum.select(2, 0).flatten(), {2, 2, 4, 4}));
      },
      on_device(std::chrono::seconds(20)));
  EXPECT_TRUE(take_reports().empty());
}

// No collective begins before the last product is over.
TEST_F(Communicators, AProductWaitsForNoSumOfAnEarlierChunk) {
  run_ranks(
      2,
      [](World& world) {
        const TensorParallel parallel{
            world.group(), {.sequence_parallel = true, .overlap_chunks = 2}};
        const detail::TokenChunks chunks(8, parallel, parallel.chunks());
        const auto options = torch::dtype(torch::kFloat).device(world.device());
        world.exchange("");
        hold(true);
        detail::TokenReduceScatter scatter(3, options, chunks, parallel, "sum");
        scatter.fill([&](const torch::Tensor& rows, const auto&) {
          rows.fill_(1 + world.rank());
        });
        EXPECT_TRUE(is_done_soon(world.device()));
        world.exchange("");
        hold(false);
        const auto mine = scatter.finish();
        EXPECT_TRUE(holds(mine.select(1, 0).contiguous(), {3, 3, 3, 3}));
      },
      on_device());
  EXPECT_TRUE(take_reports().empty());
}

}  // namespace echelon::communicators_test
