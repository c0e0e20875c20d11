// CUDA graphs: what a capture refuses, and captured steps that equal eager ones
// to the bit.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <ATen/DeviceAccelerator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cctype>
#include <chrono>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "echelon/comm/nccl/accelerator.h"
#include "echelon/counting/meta_mode.h"
#include "echelon/timeline/metrics.h"
#include "echelon/timeline/recorder.h"
#include "echelon/train/step_graphs.h"
#include "echelon/train/trainer.h"
#include "tests/support/temp_folder.h"
#include "tests/test_device/places.h"
#include "tests/test_device/runtime.h"
#include "tests/train/composition_cases.h"

namespace echelon::graphs_test {

using namespace composition;
using namespace test_device;
using testing::HasSubstr;
using torch::Tensor;

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

class DeviceGraphTest : public testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    counting::detail::need_meta_kernels();
    set_current_device(0);
    stream_.emplace(new_stream());
    take_reports();
    reset_counts(0);
  }
  void TearDown() override {
    stream_.reset();
    drain(0);
    for (const auto& report : take_reports()) ADD_FAILURE() << report.text;
  }
  // What begins a capture of `work` and ends it.
  std::string capture_error(const std::function<void()>& work) {
    DeviceGraph graph(device());
    return error_of([&] {
      graph.begin();
      work();
      graph.end();
    });
  }

  const torch::TensorOptions there_ = torch::TensorOptions().device(device());

 private:
  std::optional<c10::StreamGuard> stream_;
};

TEST_F(DeviceGraphTest, RepeatsWhatWasCaptured) {
  const Tensor x = torch::ones({3}, there_);
  DeviceGraph graph(device());
  graph.begin();
  EXPECT_TRUE(is_capturing(device()));
  const Tensor twice = x * 2;
  x.add_(1);
  graph.end();
  EXPECT_FALSE(is_capturing(device()));
  EXPECT_TRUE(x.cpu().equal(torch::full({3}, 1.0)));  // nothing has run
  for (double value = 1; value < 4; ++value) {
    graph.replay();
    EXPECT_TRUE(twice.cpu().equal(torch::full({3}, 2 * value)));
    EXPECT_TRUE(x.cpu().equal(torch::full({3}, value + 1)));
  }
  EXPECT_EQ(counts(0).replays, 3);
}

TEST_F(DeviceGraphTest, OtherStreamsAreCapturedWhereTheyWait) {
  const Tensor x = torch::ones({3}, there_);
  const c10::Stream side = new_stream();
  Tensor y;
  DeviceGraph graph(device());
  graph.begin();
  x.mul_(3);
  order(current(), side);
  {
    const c10::StreamGuard on(side);
    y = x + 1;
  }
  order(side, current());
  y.mul_(2);
  graph.end();
  graph.replay();
  EXPECT_TRUE(y.cpu().equal(torch::full({3}, 8.0)));
}

TEST_F(DeviceGraphTest, TheHostMayNotLookOrWait) {
  const Tensor x = torch::ones({3}, there_);
  const Tensor pinned = torch::ones({3}).pin_memory();
  const auto refused = HasSubstr("not permitted");
  EXPECT_THAT(capture_error([&] { x.sum().item(); }), refused);
  EXPECT_THAT(capture_error([&] { x.cpu(); }), refused);
  EXPECT_THAT(capture_error([&] { x.copy_(torch::ones({3})); }), refused);
  EXPECT_THAT(capture_error([&] { x.copy_(pinned, true); }), refused);
  EXPECT_THAT(capture_error([&] { guard().synchronizeDevice(0); }), refused);
  EXPECT_THAT(
      capture_error([&] {
        c10::Event event(torch::kPrivateUse1);
        event.record(current());
        event.query();
      }),
      refused);
  EXPECT_FALSE(is_capturing(device()));
  EXPECT_EQ(x.sum().item<double>(), 3);  // an error has left nothing open
}

TEST_F(DeviceGraphTest, StreamsMustBeJoined) {
  const Tensor x = torch::ones({3}, there_);
  const c10::Stream side = new_stream();
  EXPECT_THAT(
      capture_error([&] {
        order(current(), side);
        const c10::StreamGuard on(side);
        x.add_(1);
      }),
      HasSubstr("unjoined work: aten::add"));
  EXPECT_THAT(
      capture_error([&] {
        const c10::Stream other = new_stream();
        order(other, current());
      }),
      HasSubstr("dependency created on uncaptured work"));
  c10::Event event(torch::kPrivateUse1);
  EXPECT_EQ(capture_error([&] { event.record(current()); }), "no error");
  EXPECT_THAT(
      error_of([&] { event.block(current()); }),
      HasSubstr("a capture that is over"));
}

TEST_F(DeviceGraphTest, NoDefaultStreamIsCaptured) {
  const c10::StreamGuard on(guard().getDefaultStream(device()));
  EXPECT_THAT(capture_error([] {}), HasSubstr("non-default stream"));
}

TEST_F(DeviceGraphTest, WorkThatNoGraphHasIsReported) {
  const Tensor x = torch::ones({3}, there_);
  const c10::Stream side = new_stream();
  EXPECT_EQ(
      capture_error([&] {
        const c10::StreamGuard on(side);
        const Tensor y = torch::ones({3}, there_);
      }),
      "no error");
  const auto reports = take_reports();
  ASSERT_FALSE(reports.empty());
  EXPECT_EQ(reports[0].finding, Finding::outside_capture);
}

TEST_F(DeviceGraphTest, ItsMemoryIsItsOwn) {
  const Tensor x = torch::ones({1000}, there_);
  DeviceGraph first(device());
  const void* address = nullptr;
  first.begin();
  {
    const Tensor freed = x * 2;
    address = freed.data_ptr();
  }
  const Tensor reused = x * 3;
  first.end();
  EXPECT_EQ(reused.data_ptr(), address);
  const void* in_graph = nullptr;
  DeviceGraph second(device());
  second.begin(&first);
  {
    const Tensor freed = x * 4;
    in_graph = freed.data_ptr();
  }
  second.end();
  const Tensor other = torch::ones({1000}, there_);
  EXPECT_NE(other.data_ptr(), in_graph);  // which is free, and the graphs'
}

TEST_F(DeviceGraphTest, MemoryThatIsGoneIsReported) {
  auto x = torch::ones({1000}, there_);
  const Tensor y = torch::ones({1000}, there_);
  DeviceGraph graph(device());
  graph.begin();
  y.add_(x);
  graph.end();
  graph.replay();
  EXPECT_TRUE(take_reports().empty());
  x.reset();
  graph.replay();
  const auto reports = take_reports();
  ASSERT_FALSE(reports.empty());
  EXPECT_EQ(reports[0].finding, Finding::freed_in_graph);
  EXPECT_THAT(reports[0].text, HasSubstr("add"));
}

// ------------------------------------------------------------------- training

struct Training {
  std::string name;
  Job job;
};

void PrintTo(const Training& training, std::ostream* out) {
  *out << training.name;
}

// Ten steps in batches that do not divide an epoch, with a rate that changes
// and evaluations between them.
std::vector<Training> trainings() {
  std::vector<Training> all;
  const auto add = [&](const ModelOptions& model, const std::string& layout,
                       const std::string& also,
                       const std::function<void(Job&)>& change = nullptr) {
    Job job = job_of(model, "");
    job.layout = parse_layout(layout);
    job.optimizer.name = OptimizerKind::adamw;
    job.optimizer.learning_rate = 1e-2;
    job.optimizer.schedule = RateSchedule::cosine;
    job.model.dtype = ModelDtype::float32;
    job.data.documents = Documents::packed;
    job.data.holdout = 0.3;
    job.train.steps = 11;
    job.train.batch = 8;
    job.train.eval_every = 7;
    job.train.timeline_steps = 0;
    job.train.threads = 1;  // sums have the order of threads
    if (model.name == "resnet18") job.pipeline.microbatches = 2;
    if (change) change(job);
    std::string name = model.name + "_" + layout + "_" + also;
    std::erase_if(name, [](char c) { return c == '='; });
    std::ranges::replace_if(
        name, [](char c) { return !std::isalnum(c) && c != '_'; }, '_');
    all.push_back({name, job});
  };
  for (const auto& model : {tiny_gpt(), llama(), kSimpleCnn}) {
    const bool text = model.name != "simple_cnn";
    add(model, "dp=1", "");
    add(model, "dp=2", "norms, saved", [](Job& job) {
      job.train.layer_norms = true;
      job.train.log_every = 3;
      job.train.on_non_finite = OnNonFinite::skip;
      job.checkpoint.every_steps = 2;
    });
    for (const int64_t stage : {1, 2, 3}) {
      add(model, "fsdp=2", stage_text(stage),
          [&](Job& job) { job.shard.stage = stage; });
    }
    add(model, "pp=2", "1f1b");
    if (!text) continue;
    add(model, "tp=2", "");
    add(model, "tp=2", "sequence parallel",
        [](Job& job) { job.tensor.sequence_parallel = true; });
    add(model, "cp=2", "");
    add(model, "fsdp=2,tp=2,pp=2", "sequence parallel",
        [](Job& job) { job.tensor.sequence_parallel = true; });
    add(model, "dp=2,pp=2", "zb-v", [](Job& job) {
      job.model.layers = 4;
      job.pipeline.schedule = schedule_kind("zb-v");
    });
    add(model, "dp=2", "dropout, accumulated, fp16", [](Job& job) {
      if (job.model.name == "gpt") job.model.dropout = 0.3;
      job.train.accumulate = 2;
      job.precision.compute = ComputeDtype::fp16;
    });
    add(model, "fsdp=2", "bf16, recompute, sgd", [](Job& job) {
      job.precision.compute = ComputeDtype::bf16;
      job.memory.recompute = Recompute::all;
      job.optimizer.name = OptimizerKind::sgd;
    });
  }
  for (const char* layout : {"dp=2", "fsdp=2"}) {
    add(llama(), layout, "adapters", [](Job& job) {
      job.model.lora = {.rank = 3, .targets = {"q_proj", "down_proj"}};
    });
  }
  for (const char* name : {"mistral", "qwen3"}) {
    add(architecture(name), "fsdp=2", "documents",
        [](Job& job) { job.data.documents = Documents::respected; });
  }
  add(kResnet18, "dp=2", "", [](Job& job) { job.data.samples = 100; });
  add(architecture("gemma3"), "tp=2", "");
  return all;
}

class TrainingInGraphs : public testing::TestWithParam<Training> {};

std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST_P(TrainingInGraphs, EqualsEagerSteps) {
  TempFolder folder;
  Job job = GetParam().job;
  if (!job.data.sources.empty()) job.data.sources = {write_tokens(folder)};
  const auto run = [&](CudaGraphs graphs) {
    job.train.cuda_graphs = graphs;
    const std::string run = folder.path(to_string(graphs));
    const auto ranks = static_cast<int>(job.layout.num_ranks());
    for (int rank = 0; rank < ranks; ++rank) reset_counts(rank);
    run_ranks(
        ranks,
        [&](World& world) {
          at::set_num_threads(1);
          train(job, world, run, layers_of(job));
        },
        {.device = DeviceKind::test,
         .backend = BackendKind::nccl,
         .timeout = std::chrono::seconds(60)});
    for (int rank = 0; rank < ranks; ++rank) {
      drain(rank);
      const int64_t replays = counts(rank).replays;
      if (graphs == CudaGraphs::off) {
        EXPECT_EQ(replays, 0);
      } else {
        EXPECT_GE(replays, 2 * 4);  // of forward and backward, and updates
      }
    }
    for (const auto& report : take_reports()) ADD_FAILURE() << report.text;
    return run;
  };
  const std::string captured = run(CudaGraphs::on);
  const std::string eager = run(CudaGraphs::off);
  const auto a = timeline::read_metrics(captured + "/metrics.jsonl");
  const auto b = timeline::read_metrics(eager + "/metrics.jsonl");
  ASSERT_EQ(a.steps.size(), b.steps.size());
  for (size_t i = 0; i < a.steps.size(); ++i) {
    EXPECT_EQ(a.steps[i].loss, b.steps[i].loss) << i;
    EXPECT_EQ(a.steps[i].learning_rate, b.steps[i].learning_rate) << i;
    EXPECT_EQ(a.steps[i].layer_grad_norms, b.steps[i].layer_grad_norms) << i;
  }
  ASSERT_EQ(a.evaluations.size(), b.evaluations.size());
  for (size_t i = 0; i < a.evaluations.size(); ++i) {
    EXPECT_EQ(a.evaluations[i].loss, b.evaluations[i].loss);
  }
  const std::string file = "/checkpoints/last.safetensors";
  const std::string weights = bytes_of(captured + file);
  EXPECT_FALSE(weights.empty());
  EXPECT_TRUE(weights == bytes_of(eager + file));
}

// ---------------------------------------------------------------- what changes

CommOptions on_test_device() {
  return {
      .device = DeviceKind::test,
      .backend = BackendKind::nccl,
      .timeout = std::chrono::seconds(60)};
}

/// Trains by hand: a step of each of `batches`, with the replays of each.
class Steps {
 public:
  Steps(Job job, World& world, CudaGraphs graphs = CudaGraphs::on)
      : job_(with_graphs(std::move(job), graphs)),
        stream_(job_, world),
        run_(job_, world),
        recorder_(world.rank(), 0, 0),
        graphs_(job_, world, run_.state, recorder_, [this](const auto& line) {
          told_.push_back(line);
        }) {}

  int64_t step(
      const Batch& batch, bool eager = false, double skip = 0,
      const std::function<void()>& between = nullptr) {
    const int rank = run_.world.rank();
    const int64_t before = counts(rank).replays;
    graphs_.forward_backward(batch, run_.counts_units(), eager);
    if (between) between();
    graphs_.update(
        step_++, false, nullptr,
        torch::full(
            {}, skip, torch::dtype(torch::kFloat32).device(device(rank))));
    return counts(rank).replays - before;
  }
  Batch batch(int64_t samples) {
    Batch all = run_.next_batch();
    for_tensors(all, [&](Tensor& one) { one = one.narrow(0, 0, samples); });
    all.global_count = samples;
    return all;
  }
  std::vector<Tensor> parameters() {
    graphs_.leave();
    std::vector<Tensor> all;
    for (const auto& part : run_.state.model().parameters()) {
      all.push_back(part.value.detach().cpu().clone());
    }
    return all;
  }
  StepGraphs& graphs() { return graphs_; }
  ParallelModel& model() { return run_.state.model(); }
  const std::vector<std::string>& told() const { return told_; }

 private:
  static Job with_graphs(Job job, CudaGraphs graphs) {
    job.train.cuda_graphs = graphs;
    job.train.batch = 8;
    return job;
  }

  const Job job_;
  StreamForGraphs stream_;
  SmallRun run_;
  timeline::Recorder recorder_;
  std::vector<std::string> told_;
  StepGraphs graphs_;
  int64_t step_ = 0;
};

void on_one_rank(const std::function<void(World&)>& body) {
  run_ranks(
      1,
      [&](World& world) {
        at::set_num_threads(1);
        body(world);
        drain(0);
      },
      on_test_device());
  for (const auto& report : take_reports()) ADD_FAILURE() << report.text;
}

TEST(StepGraphsTest, OtherShapesRunEagerly) {
  on_one_rank([](World& world) {
    Steps steps(job_of(kSimpleCnn, ""), world);
    const Batch full = steps.batch(8), half = steps.batch(4);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(steps.step(full), 0);
    EXPECT_EQ(steps.step(full), 2);
    EXPECT_EQ(steps.step(half), 0);
    EXPECT_EQ(steps.step(full), 2);
    EXPECT_EQ(steps.step(full, /*eager=*/true), 0);
    EXPECT_EQ(steps.step(full), 2);
    // Three in a row are the new shape.
    for (int i = 0; i < 3; ++i) EXPECT_EQ(steps.step(half), 0);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(steps.step(half), 2);
    EXPECT_EQ(steps.step(full), 0);
    steps.graphs().leave();
    steps.graphs().drop();
    EXPECT_EQ(steps.step(half), 2);  // captured anew at once
    EXPECT_TRUE(steps.told().empty());
  });
}

TEST(StepGraphsTest, ItIsToldWhenStepsAreCapturedOften) {
  on_one_rank([](World& world) {
    Steps steps(job_of(kSimpleCnn, ""), world);
    const std::vector<Batch> batches{steps.batch(8), steps.batch(4)};
    for (int i = 0; i < 60; ++i) steps.step(batches[i / 4 % 2]);
    ASSERT_EQ(steps.told().size(), 1u);
    EXPECT_THAT(
        steps.told()[0], HasSubstr("10 of 40 steps were captured anew"));
  });
}

TEST(StepGraphsTest, AStepThatIsSkippedChangesNothing) {
  on_one_rank([](World& world) {
    Steps steps(job_of(kSimpleCnn, ""), world);
    const Batch batch = steps.batch(8);
    for (int i = 0; i < 5; ++i) steps.step(batch);
    const auto before = steps.parameters();
    EXPECT_EQ(steps.step(batch, false, /*skip=*/1), 2);
    const auto left_out = steps.parameters();
    EXPECT_EQ(steps.step(batch), 2);
    const auto after = steps.parameters();
    for (size_t i = 0; i < before.size(); ++i) {
      EXPECT_TRUE(before[i].equal(left_out[i])) << i;
      EXPECT_FALSE(before[i].equal(after[i])) << i;
    }
  });
}

// As for the layer of a loss that is not finite.
TEST(StepGraphsTest, LayersMayBeLookedAtBetweenTheHalvesOfAStep) {
  TempFolder folder;
  Job job = job_of(tiny_gpt(), write_tokens(folder));
  job.layout.dp_shard = 2;
  for (const int64_t stage : {1, 2, 3}) {
    job.shard.stage = stage;
    std::vector<std::vector<Tensor>> ends;
    for (const bool looks : {false, true}) {
      run_ranks(
          2,
          [&](World& world) {
            at::set_num_threads(1);
            Steps steps(job, world);
            const Batch batch = steps.batch(4);
            for (int i = 0; i < 7; ++i) {
              const auto look = [&] {
                if (!looks || i < 4) return;
                steps.graphs().leave();
                EXPECT_FALSE(steps.model().find_nonfinite(batch));
              };
              EXPECT_EQ(steps.step(batch, false, 0, look), i < 3 ? 0 : 2);
            }
            auto end = steps.parameters();
            if (world.rank() == 0) ends.push_back(std::move(end));
            drain(world.rank());
            world.group().barrier();
          },
          on_test_device());
    }
    for (const auto& report : take_reports()) ADD_FAILURE() << report.text;
    ASSERT_EQ(ends.size(), 2u);
    for (size_t i = 0; i < ends[0].size(); ++i) {
      EXPECT_TRUE(ends[0][i].equal(ends[1][i])) << stage << " " << i;
    }
  }
}

/// Takes what memory of a device is free, but for `bytes`. It is another
/// stream's, so that no cached memory is taken.
class TakenMemory {
 public:
  TakenMemory(int index, int64_t bytes) {
    const c10::StreamGuard other(new_stream(index));
    const auto free =
        static_cast<int64_t>(allocator_->getMemoryInfo(index).first);
    taken_ = torch::empty(
        {free - bytes}, at::device(device(index)).dtype(torch::kByte));
  }
  ~TakenMemory() {
    taken_.reset();
    allocator_->emptyCache();
  }
  TakenMemory(const TakenMemory&) = delete;
  TakenMemory& operator=(const TakenMemory&) = delete;

 private:
  c10::DeviceAllocator* const allocator_ =
      at::getDeviceAllocator(torch::kPrivateUse1);
  Tensor taken_;
};

// Where there is no room for both, the graph is dropped before an eager step,
// but not between the halves of a step that is one.
TEST(StepGraphsTest, AGraphIsGivenUpWhereMemoryIsShort) {
  on_one_rank([](World& world) {
    Job job = small_mlp();
    job.model.hidden = {1024, 1024};  // gradients of 9 MiB
    auto* const allocator = at::getDeviceAllocator(torch::kPrivateUse1);
    Steps steps(job, world);
    const Batch batch = steps.batch(8);
    for (int i = 0; i < 3; ++i) steps.step(batch);
    const auto reserved = [&] {
      return allocator->getDeviceStats(0).reserved_bytes[0].current;
    };
    const int64_t eager = reserved();
    const int64_t cached =
        eager - allocator->getDeviceStats(0).allocated_bytes[0].current;
    const TakenMemory rest(0, cached * 3 / 4);
    const int64_t taken = reserved() - eager;
    EXPECT_EQ(steps.step(batch), 2);
    const auto leave = [&] { steps.graphs().leave(); };
    EXPECT_EQ(steps.step(batch, false, 0, leave), 2);
    EXPECT_EQ(steps.step(batch, /*eager=*/true), 0);
    EXPECT_LE(reserved() - taken, eager + cached / 4);
    EXPECT_EQ(steps.step(batch), 2);
  });
}

// All ranks stay eager where one of them has no room: a replay begins with
// all-gathers that eager ranks have behind them.
TEST(StepGraphsTest, StepsStayEagerWhereNoGraphHasRoom) {
  Job job = small_mlp();
  job.model.hidden = {1024, 1024};
  job.layout.dp_shard = 2;
  job.shard.stage = 1;
  run_ranks(
      2,
      [&](World& world) {
        at::set_num_threads(1);
        Steps steps(job, world);
        const Batch batch = steps.batch(4);
        for (int i = 0; i < 3; ++i) steps.step(batch);
        std::optional<TakenMemory> rest;
        if (world.rank() == 1) rest.emplace(1, 0);
        for (int i = 0; i < 3; ++i) EXPECT_EQ(steps.step(batch), 0);
        ASSERT_EQ(steps.told().size(), 1u);
        EXPECT_THAT(steps.told()[0], HasSubstr("the fullest GPU lacks"));
        drain(world.rank());
        world.group().barrier();
      },
      on_test_device());
  for (const auto& report : take_reports()) ADD_FAILURE() << report.text;
}

TEST(StepGraphsTest, StepsStayEagerWhereARankCapturesNothing) {
  run_ranks(
      2,
      [](World& world) {
        at::set_num_threads(1);
        Job job = job_of(kSimpleCnn, "");
        job.layout.dp_shard = 2;
        job.shard.stage = 1;
        const bool captures = world.rank() == 0;
        Steps steps(job, world, captures ? CudaGraphs::on : CudaGraphs::off);
        const Batch batch = steps.batch(4);
        for (int i = 0; i < 4; ++i) EXPECT_EQ(steps.step(batch), 0);
        drain(world.rank());
        world.group().barrier();
      },
      on_test_device());
  for (const auto& report : take_reports()) ADD_FAILURE() << report.text;
}

// Ranks that leave out samples do not have equal batches.
TEST(StepGraphsTest, StepsStayEagerWhereSamplesAreSkipped) {
  run_ranks(
      2,
      [](World& world) {
        at::set_num_threads(1);
        Job job = job_of(kSimpleCnn, "");
        job.layout.dp_replicate = 2;
        Steps steps(job, world);
        Batch batch = steps.batch(4);
        batch.may_skip = true;
        for (int i = 0; i < 4; ++i) EXPECT_EQ(steps.step(batch), 0);
        ASSERT_EQ(steps.told().size(), 1u);
        EXPECT_THAT(steps.told()[0], HasSubstr("leave out samples"));
        drain(world.rank());
        world.group().barrier();
      },
      on_test_device());
  for (const auto& report : take_reports()) ADD_FAILURE() << report.text;
}

struct Scale : torch::nn::Module {
  Tensor forward(const Tensor& x) {
    return x.flatten(1) / x.abs().max().item<double>();
  }
};

std::string train_error(const Job& job, const LayerFactory& layers) {
  TempFolder folder;
  std::string text = "no error";
  try {
    run_ranks(
        1, [&](World& world) { train(job, world, folder.path("run"), layers); },
        job.comm);
  } catch (const Error& error) {
    text = error.what();
  }
  drain(0);
  clear_error(0);
  take_reports();
  return text;
}

TEST(StepGraphsTest, AStepThatLooksAtTheDeviceSaysTheWayOut) {
  Job job = job_of(kSimpleCnn, "");
  job.comm = on_test_device();
  job.train.steps = 8;
  job.train.batch = 8;
  job.train.timeline_steps = 0;
  job.train.threads = 1;
  job.train.cuda_graphs = CudaGraphs::on;
  const LayerFactory layers = [](const TensorParallel&) {
    LayerList list;
    list.add("scale", [] { return std::make_shared<Scale>(); });
    list.add("fc", [] { return torch::nn::Linear(64, 10); });
    return list;
  };
  EXPECT_THAT(
      train_error(job, layers),
      AllOf(
          HasSubstr("[train] cuda_graphs = \"on\""), HasSubstr("item"),
          HasSubstr("set cuda_graphs = \"off\"")));
  job.train.cuda_graphs = CudaGraphs::automatic;  // a program's own layers
  EXPECT_EQ(train_error(job, layers), "no error");
}

TEST(StepGraphsTest, CpusHaveNone) {
  Job job = job_of(kSimpleCnn, "");
  job.comm.device = DeviceKind::cpu;
  job.train.cuda_graphs = CudaGraphs::on;
  EXPECT_THAT(
      train_error(job, {}),
      AllOf(HasSubstr("compute on CPUs"), HasSubstr("set \"auto\"")));
}

INSTANTIATE_TEST_SUITE_P(
    All, TrainingInGraphs, testing::ValuesIn(trainings()),
    [](const auto& info) { return info.param.name; });

}  // namespace echelon::graphs_test
