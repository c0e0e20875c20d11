// Memory that a communicator has registered: what Group allocates, and sharded
// data parallelism that trains in it.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "echelon/comm/nccl/accelerator.h"
#include "echelon/error.h"
#include "echelon/parallel/shard/buffer_pool.h"
#include "echelon/profiling/memory_meter.h"
#include "echelon/timeline/recorder.h"
#include "echelon/train/step_graphs.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"
#include "tests/test_device/places.h"
#include "tests/train/composition_cases.h"

namespace echelon::registered_test {

using namespace composition;
using namespace test_device;
using testing::HasSubstr;
using torch::Tensor;

/// Runs `body` on devices that begin without counts and reports, and expects
/// none of the latter.
void on_devices(int ranks, const std::function<void(World&)>& body) {
  take_reports();
  for (int rank = 0; rank < ranks; ++rank) reset_counts(rank);
  run_ranks(
      ranks,
      [&](World& world) {
        at::set_num_threads(1);
        body(world);
        drain(world.rank());
      },
      {.device = DeviceKind::test,
       .backend = BackendKind::nccl,
       .timeout = std::chrono::seconds(60)});
  for (const auto& report : take_reports()) ADD_FAILURE() << report.text;
}

/// While it lives, communicators of these devices register no memory.
class Without {
 public:
  explicit Without(std::vector<int> devices) {
    Options changed = before_;
    changed.without_registration = std::move(devices);
    set_options(changed);
  }
  ~Without() { set_options(before_); }
  Without(const Without&) = delete;
  Without& operator=(const Without&) = delete;

 private:
  const Options before_ = options();
};

// ------------------------------------------------------------------ the group

TEST(RegisteredMemory, IsOfAPoolOfItsCommunicator) {
  on_devices(2, [](World& world) {
    const Group& group = world.group();
    EXPECT_EQ(group.why_not_registered(), "");
    Tensor memory = group.allocate_registered(4096);
    EXPECT_EQ(memory.device(), world.device());
    EXPECT_EQ(memory.scalar_type(), torch::kUInt8);
    EXPECT_EQ(memory.sizes(), (std::vector<int64_t>{4096}));
    const auto other = torch::empty_like(memory);
    reset_counts(world.rank());
    const int64_t own = 2048 * world.rank();
    memory.narrow(0, own, 2048).fill_(world.rank() + 1);
    group.all_gather(memory, memory.narrow(0, own, 2048)).wait();
    group.reduce_scatter(other.narrow(0, 0, 2048), memory).wait();
    EXPECT_EQ(counts(world.rank()).registered, 2);
    group.all_gather(other, memory.narrow(0, own, 2048)).wait();
    EXPECT_EQ(counts(world.rank()).unregistered, 1);
    EXPECT_EQ(memory.to(torch::kInt64).sum().item<int64_t>(), 3 * 2048);
    // No other tensor gets it when it is free.
    const void* const address = memory.const_data_ptr();
    memory = Tensor();
    EXPECT_NE(torch::empty_like(other).const_data_ptr(), address);
    EXPECT_EQ(group.allocate_registered(4096).const_data_ptr(), address);
  });
}

TEST(RegisteredMemory, AllRanksLearnThatOneHasNone) {
  const Without second({1});
  on_devices(2, [](World& world) {
    const Group& group = world.group();
    EXPECT_THAT(
        group.why_not_registered(),
        HasSubstr(
            world.rank() == 0 ? "another rank's GPU has no NVLink SHARP"
                              : "NVLink SHARP (multicast), which "));
    if (world.rank() == 0) return;
    EXPECT_THAT(
        error_text<ConfigError>([&] { group.allocate_registered(8); }),
        HasSubstr("on axis world of 2 ranks: no memory is registered"));
  });
}

// A device's default stream is not captured.
TEST(RegisteredMemory, IsNotAllocatedWhileAGraphIsCaptured) {
  on_devices(2, [](World& world) {
    const torch::Device there = world.device();
    const c10::StreamGuard on(new_stream(world.rank()));
    sharding::BufferPool pool(there);
    pool.register_with(world.group());
    pool.give(512, pool.take(512));
    reset_counts(world.rank());
    DeviceGraph graph(there);
    graph.begin();
    at::DataPtr block = pool.take(512);
    EXPECT_THAT(
        error_text<ConfigError>([&] { pool.take(512); }),
        HasSubstr("while a graph is captured"));
    EXPECT_THAT(
        error_text<ConfigError>([&] { pool.take(1024); }),
        HasSubstr("while a graph is captured"));
    graph.end();
    EXPECT_EQ(counts(world.rank()).allocations, 0);
    pool.give(512, std::move(block));
  });
}

// ------------------------------------------------------------------- training

/// What a training left behind.
struct Trained {
  std::vector<std::vector<Tensor>> parameters;  // by rank
  std::vector<std::vector<Tensor>> gradients;   // of the last step
  std::vector<timeline::MemoryByKind> peaks;
  int64_t registered = 0, unregistered = 0;  // of all ranks
};

constexpr int64_t kSteps = 3;

Trained train(Job job, bool registered) {
  job.shard.registered_buffers = registered;
  const auto ranks = static_cast<int>(job.layout.num_ranks());
  Trained result;
  result.parameters.resize(ranks);
  result.gradients.resize(ranks);
  result.peaks.resize(ranks);
  on_devices(ranks, [&](World& world) {
    const auto rank = static_cast<size_t>(world.rank());
    profiling::MemoryMeter meter(world.device());
    const auto counting = meter.count();
    SmallRun run(job, world);
    const Batch batch = run.next_batch();
    const auto forward_backward = [&] {
      run.state.model().forward_backward(batch, run.counts_units());
    };
    for (int64_t step = 0; step + 1 < kSteps; ++step) {
      forward_backward();
      run.state.update(step, false, nullptr);
      // A pipeline gathers names and shapes at first.
      if (step == 0) reset_counts(world.rank());
    }
    meter.reset_peak();
    forward_backward();
    result.peaks[rank] = meter.peak();
    for (const auto& part : run.state.model().parameters()) {
      if (!part.gradient.defined()) continue;
      result.gradients[rank].push_back(part.gradient.cpu().clone());
    }
    run.state.update(kSteps - 1, false, nullptr);
    for (const auto& part : run.state.model().parameters()) {
      result.parameters[rank].push_back(part.value.detach().cpu().clone());
    }
  });
  for (int rank = 0; rank < ranks; ++rank) {
    result.registered += counts(rank).registered;
    result.unregistered += counts(rank).unregistered;
  }
  return result;
}

void expect_equal(
    const std::vector<std::vector<Tensor>>& a,
    const std::vector<std::vector<Tensor>>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t rank = 0; rank < a.size(); ++rank) {
    ASSERT_EQ(a[rank].size(), b[rank].size());
    EXPECT_FALSE(a[rank].empty());
    for (size_t i = 0; i < a[rank].size(); ++i) {
      EXPECT_TRUE(a[rank][i].equal(b[rank][i])) << "rank " << rank << ", " << i;
    }
  }
}

struct Case {
  std::string name;
  std::string layout;
  std::function<void(Job&)> change;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const int64_t stage : {1, 2, 3}) {
    all.push_back({"stage " + std::to_string(stage), "fsdp=2", [=](Job& job) {
                     job.shard.stage = stage;
                   }});
  }
  const auto add = [&](const std::string& name, const std::string& layout,
                       std::function<void(Job&)> change) {
    all.push_back({name, layout, std::move(change)});
  };
  add("hybrid, accumulated", "dp=2,fsdp=2",
      [](Job& job) { job.train.accumulate = 2; });
  add("hybrid, stage 1", "dp=2,fsdp=2", [](Job& job) { job.shard.stage = 1; });
  add("bf16", "fsdp=2",
      [](Job& job) { job.precision.compute = ComputeDtype::bf16; });
  add("offload", "fsdp=2",
      [](Job& job) { job.memory.offload = Offload::parameters; });
  add("pipeline", "fsdp=2,pp=2", [](Job&) {});
  return all;
}

TEST(RegisteredBuffers, TrainToTheSameBits) {
  TempFolder folder;
  Job job = job_of(tiny_gpt(), write_tokens(folder));
  job.train.steps = kSteps;
  for (const auto& [name, layout, change] : cases()) {
    SCOPED_TRACE(name);
    Job changed = job;
    changed.layout = parse_layout(layout);
    change(changed);
    const Trained with = train(changed, true);
    const Trained without = train(changed, false);
    expect_equal(with.parameters, without.parameters);
    expect_equal(with.gradients, without.gradients);
    // Every all-gather and reduce-scatter of these steps is of flat buffers.
    EXPECT_EQ(with.unregistered, 0);
    EXPECT_GT(with.registered, 0);
    EXPECT_EQ(without.registered, 0);
    EXPECT_EQ(without.unregistered, with.registered);
    // Blocks are counted as they were. In a pipeline, messages end at any time.
    if (changed.layout.pp > 1) continue;
    for (size_t rank = 0; rank < with.peaks.size(); ++rank) {
      EXPECT_EQ(with.peaks[rank].bytes, without.peaks[rank].bytes) << rank;
      EXPECT_GT(with.peaks[rank].total(), 0);
    }
  }
}

// Experts are sharded over another group than the rest is: each has its pool.
TEST(RegisteredBuffers, OfExpertsAreOfTheirOwnGroup) {
  TempFolder folder;
  Job job = job_of(mixture("mixtral"), write_tokens(folder));
  job.train.steps = kSteps;
  job.layout = parse_layout("fsdp=4,ep=2");
  const Trained with = train(job, true);
  const Trained without = train(job, false);
  expect_equal(with.parameters, without.parameters);
  EXPECT_EQ(with.unregistered, 0);
  EXPECT_EQ(without.unregistered, with.registered);
}

// As eager steps, captured ones use the blocks that the steps before have left.
TEST(RegisteredBuffers, ServeCapturedSteps) {
  TempFolder folder;
  Job job = job_of(tiny_gpt(), write_tokens(folder));
  job.train.batch = 8;
  for (const auto& [layout, stage] : std::vector<std::pair<std::string, int>>{
           {"fsdp=2", 1}, {"fsdp=2", 2}, {"fsdp=2", 3}, {"dp=2,fsdp=2", 3}}) {
    SCOPED_TRACE(layout + ", stage " + std::to_string(stage));
    job.layout = parse_layout(layout);
    job.shard.stage = stage;
    const auto ranks = static_cast<int>(job.layout.num_ranks());
    const auto run = [&](bool registered, CudaGraphs graphs) {
      Job one = job;
      one.shard.registered_buffers = registered;
      one.train.cuda_graphs = graphs;
      std::vector<std::vector<Tensor>> parameters(ranks);
      on_devices(ranks, [&](World& world) {
        const StreamForGraphs stream(one, world);
        SmallRun run(one, world);
        timeline::Recorder recorder(world.rank(), 0, 0);
        StepGraphs steps(one, world, run.state, recorder, [](const auto& line) {
          ADD_FAILURE() << line;
        });
        const Batch batch = run.next_batch();
        for (int64_t step = 0; step < 7; ++step) {
          steps.forward_backward(batch, run.counts_units(), false);
          steps.update(
              step, false, nullptr,
              torch::zeros(
                  {}, torch::dtype(torch::kFloat32).device(world.device())));
        }
        steps.leave();
        for (const auto& part : run.state.model().parameters()) {
          parameters[static_cast<size_t>(world.rank())].push_back(
              part.value.detach().cpu().clone());
        }
      });
      for (int rank = 0; rank < ranks; ++rank) {
        EXPECT_EQ(counts(rank).unregistered == 0, registered);
        const bool replays = counts(rank).replays > 0;
        EXPECT_EQ(replays, graphs == CudaGraphs::on);
      }
      return parameters;
    };
    expect_equal(run(true, CudaGraphs::on), run(false, CudaGraphs::off));
  }
}

// One rank without registered memory is enough.
TEST(RegisteredBuffers, AreOrdinaryOnesWhereTheGpuHasNone) {
  TempFolder folder;
  Job job = job_of(tiny_gpt(), write_tokens(folder));
  job.train.steps = kSteps;
  job.layout = parse_layout("fsdp=2");
  const Without first({0});
  testing::internal::CaptureStderr();
  const Trained with = train(job, true);
  const std::string told = testing::internal::GetCapturedStderr();
  EXPECT_THAT(
      told, HasSubstr("warning: [shard] registered_buffers has no effect: "));
  EXPECT_EQ(std::ranges::count(told, '\n'), 1) << told;
  EXPECT_EQ(with.registered, 0);
  expect_equal(with.parameters, train(job, false).parameters);
}

}  // namespace echelon::registered_test
