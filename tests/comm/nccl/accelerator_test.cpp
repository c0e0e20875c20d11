// Ranks on a device whose communicators have NCCL's manners.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "echelon/comm/mesh_groups.h"
#include "echelon/comm/world.h"
#include "echelon/error.h"
#include "echelon/parallel/pipeline/pipeline.h"
#include "echelon/schedule/options.h"
#include "tests/comm/nccl/fake_accelerator.h"
#include "tests/support/error_text.h"
#include "tests/support/places.h"

namespace echelon::accelerator_test {

using fake_accelerator::Control;
using fake_accelerator::kBrokenTag;
using testing::ElementsAre;
using testing::HasSubstr;

/// Loads the fake before the door looks for the device's library.
Control& control() {
  static Control& loaded = [&]() -> Control& {
    void* library = dlopen(
        test_program("fake_accelerator/libechelon_test_device.so").c_str(),
        RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw Error(dlerror());
    using Entry = Control* (*)();
    return *reinterpret_cast<Entry>(
        dlsym(library, "echelon_fake_accelerator"))();
  }();
  return loaded;
}

CommOptions
on_device(std::chrono::milliseconds timeout = std::chrono::minutes(2)) {
  return {.device = DeviceKind::test, .timeout = timeout};
}

class Accelerator : public testing::Test {
 protected:
  void SetUp() override { control().reset(); }

  /// What the rank's device noted from its first note `from` on.
  static std::vector<std::string>
  notes_from(int rank, const std::string& from) {
    auto notes = control().notes(rank);
    notes.erase(notes.begin(), std::find(notes.begin(), notes.end(), from));
    return notes;
  }
  static int64_t count(int rank, const std::string& end) {
    const auto notes = control().notes(rank);
    return std::count_if(notes.begin(), notes.end(), [&](const auto& note) {
      return note.ends_with(end);
    });
  }
};

bool all_ended(World& world) {
  const auto records = world.history().snapshot();
  return std::all_of(records.begin(), records.end(), [](const auto& record) {
    return record.end_ns != 0 && !record.failed;
  });
}

TEST_F(Accelerator, EachRankHasItsOwn) {
  run_ranks(
      3,
      [](World& world) {
        EXPECT_EQ(world.backend(), "nccl");
        EXPECT_EQ(world.device().index(), world.rank());
      },
      on_device());
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(control().notes(rank).at(0), "set_device");
  }
}

TEST_F(Accelerator, OneRankAloneHasTheFirst) {
  const World world = World::alone(on_device());
  EXPECT_EQ(world.backend(), "nccl");
  EXPECT_EQ(world.device().index(), 0);
  EXPECT_THAT(control().notes(0), ElementsAre("set_device"));
}

TEST_F(Accelerator, MoreRanksThanDevicesAreRefused) {
  control().num_devices = 2;
  EXPECT_THROW(
      run_ranks(
          3, [](World&) {}, on_device()),
      ConfigError);
}

TEST_F(Accelerator, OptionsThatContradictEachOtherAreRefused) {
  EXPECT_THROW(
      World::alone({.device = DeviceKind::cpu, .backend = BackendKind::nccl}),
      ConfigError);
  EXPECT_THROW(
      run_ranks(
          2, [](World&) {},
          {.device = DeviceKind::test, .backend = BackendKind::gloo}),
      ConfigError);
}

// ------------------------------------------------- calls that are over at once

TEST_F(Accelerator, CallsWithoutWorkAreOver) {
  run_ranks(
      2,
      [](World& world) {
        const auto& group = world.group();
        torch::Tensor sum = torch::full({3}, 1.0 + world.rank());
        group.all_reduce(sum);
        EXPECT_TRUE(sum.equal(torch::full({3}, 3.0f)));
        torch::Tensor mean = torch::full({2}, 2.0 * world.rank());
        group.all_reduce(mean, ReduceOp::avg);
        EXPECT_TRUE(mean.equal(torch::ones({2})));
        torch::Tensor all = torch::empty({2});
        group.all_gather(all, torch::full({1}, world.rank()).to(torch::kFloat));
        EXPECT_TRUE(all.equal(torch::arange(2.0f)));
        torch::Tensor one = torch::full({1}, world.rank());
        group.broadcast(one, 1);
        EXPECT_EQ(one.item<int64_t>(), 1);
        group.barrier();
        EXPECT_TRUE(all_ended(world));
        Work work = group.all_reduce(sum, ReduceOp::sum, {.async = true});
        EXPECT_FALSE(all_ended(world));  // the device alone knows when it ends
        work.wait();
        EXPECT_TRUE(sum.equal(torch::full({3}, 6.0f)));
        group.barrier();
        EXPECT_TRUE(all_ended(world));
      },
      on_device());
}

TEST_F(Accelerator, MessagesOfABatchStartTogether) {
  run_ranks(
      3,
      [](World& world) {
        const int next = (world.rank() + 1) % 3,
                  previous = (world.rank() + 2) % 3;
        const torch::Tensor mine = torch::full({2}, world.rank());
        const torch::Tensor theirs = torch::empty_like(mine);
        world.group().batch_send_recv(
            {{.tensor = mine, .peer = next},
             {.send = false, .tensor = theirs, .peer = previous}});
        EXPECT_TRUE(theirs.equal(torch::full({2}, previous)));
        world.group().barrier();
        EXPECT_TRUE(all_ended(world));
        EXPECT_EQ(world.history().count(), 3u);
      },
      on_device());
  EXPECT_THAT(
      notes_from(0, "0 start"), ElementsAre(
                                    "0 start", "0 send 1", "0 recv 2", "0 end",
                                    "0 barrier", "synchronize", "0 shutdown"));
}

TEST_F(Accelerator, ABatchThatThrowsIsClosed) {
  run_ranks(
      2,
      [](World& world) {
        const torch::Tensor tensor = torch::ones({1});
        const int peer = 1 - world.rank();
        EXPECT_THROW(
            world.group().batch_send_recv(
                {{.tensor = tensor, .peer = peer, .tag = kBrokenTag}}),
            CommError);
        world.group().barrier();
      },
      on_device());
  EXPECT_THAT(
      notes_from(0, "0 start"), ElementsAre(
                                    "0 start", "0 send 1", "0 end", "0 barrier",
                                    "synchronize", "0 shutdown"));
}

// ------------------------------------------------------------ communicators

TEST_F(Accelerator, ASetOfRanksHasOneCommunicatorThatIsConnected) {
  run_ranks(
      4,
      [](World& world) {
        const MeshGroups groups(
            world, Layout{.dp_replicate = 2, .dp_shard = 2});
        EXPECT_EQ(groups.data().size(), 4);
        EXPECT_EQ(groups.along(Axis::dp_shard).size(), 2);
        torch::Tensor one = torch::ones({1});
        groups.data().all_reduce(one);
        EXPECT_EQ(one.item<float>(), 4);
      },
      on_device());
  EXPECT_THAT(
      control().notes(3),
      ElementsAre(
          "set_device", "0 made", "0 barrier", "1 made", "1 barrier", "2 made",
          "2 barrier", "0 all_reduce", "synchronize", "0 shutdown",
          "1 shutdown", "2 shutdown"));
}

// A pair's first message holds its hosts up. Posted as they are needed, those
// of an interleaved pipeline wait for each other in a ring.
TEST_F(Accelerator, PairsOfAPipelineConnectBeforeItRuns) {
  run_ranks(
      3,
      [](World& world) {
        LayerList layers;
        for (int i = 0; i < 6; ++i) {
          layers.add(
              "fc" + std::to_string(i), [] { return torch::nn::Linear(4, 4); });
        }
        const auto schedule = make_schedule(
            {.kind = ScheduleKind::interleaved, .ranks = 3, .microbatches = 6});
        const auto cuts = partition_evenly(layers, schedule.num_stages());
        Pipeline pipeline(
            world.group(), schedule,
            build_stages(
                layers, cuts, schedule.rank_of_stage, world.rank(), /*seed=*/1),
            {.messages_in_order = true});
        EXPECT_EQ(
            count(world.rank(), "connected 0") +
                count(world.rank(), "connected 1") +
                count(world.rank(), "connected 2"),
            2);
        std::vector<Tensors> microbatches;
        for (int i = 0; i < 6 && pipeline.has_first_stage(); ++i) {
          microbatches.push_back({torch::ones({2, 4})});
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

TEST_F(Accelerator, AnErrorAbortsTheCommunicatorsOfAllRanks) {
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

TEST_F(Accelerator, ACallThatTheDeviceNeverEndsIsReported) {
  control().hold = true;
  const auto message = error_text<CommError>([] {
    run_ranks(
        2,
        [](World& world) {
          torch::Tensor tensor = torch::ones({1});
          Call call{.label = "bucket 7", .async = true};
          world.group().all_reduce(tensor, ReduceOp::sum, call).wait();
          while (!world.history().snapshot().back().failed) {
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
          }
          world.group().barrier();
        },
        on_device(std::chrono::milliseconds(200)));
  });
  EXPECT_THAT(message, HasSubstr("all_reduce \"bucket 7\""));
}

}  // namespace echelon::accelerator_test
