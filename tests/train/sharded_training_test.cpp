// Parameters, gradients and optimizer state sharded over the ranks of dp_shard,
// in the training loop and in verify, against one device; also beside tensor
// parallelism and pipelines.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <cmath>
#include <mutex>
#include <set>

#include "echelon/checkpoint/tensors/tensor_file.h"
#include "echelon/comm/world.h"
#include "echelon/profiling/memory_meter.h"
#include "echelon/schedule/options.h"
#include "echelon/timeline/metrics.h"
#include "echelon/train/strategies/parallel_model.h"
#include "echelon/train/trainer.h"
#include "echelon/train/verify.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"
#include "tests/train/trained_runs.h"

namespace echelon::sharded_training_test {

using testing::HasSubstr;

Job job_of(const Layout& layout, int64_t stage = 3) {
  Job job;
  job.layout = layout;
  job.shard.stage = stage;
  job.model.name = "simple_cnn";
  job.train.steps = 5;
  job.train.batch = 24;
  job.optimizer.clip_norm = 0.1;
  return job;
}

// composition_test.cpp has the other layouts of each stage.
TEST(ShardedTraining, EqualsOneDevice) {
  for (const int64_t stage : {1, 2, 3}) {
    for (const Layout& layout : parse_layouts({"fsdp=3", "fsdp=2,tp=2,pp=2"})) {
      EXPECT_EQ(
          expect_equal_to_one_device(job_of(layout, stage)), 2 * (1 + 2 * 6));
    }
  }
}

TEST(ShardedTraining, GathersForUseOrForAStep) {
  for (const auto gather : {Gather::use, Gather::step}) {
    for (const Layout& layout : parse_layouts({"fsdp=2", "fsdp=2,pp=2"})) {
      for (const int64_t prefetch : {0, 3}) {
        Job job = job_of(layout);
        job.shard.gather = gather;
        job.shard.prefetch = prefetch;
        expect_equal_to_one_device(job);
      }
    }
  }
}

TEST(ShardedTraining, AccumulatesAndMayHaveUnevenBatches) {
  for (const int64_t stage : {1, 2, 3}) {
    Job job = job_of({.dp_shard = 2}, stage);
    job.train.accumulate = 3;
    expect_equal_to_one_device(job);
    job.train.accumulate = 1;
    job.train.rank_batch = {19, 5};
    expect_equal_to_one_device(job);
  }
}

TEST(ShardedTraining, EverySchedule) {
  for (const auto& schedule : schedule_names()) {
    for (const auto gather : {Gather::use, Gather::step}) {
      Job job = job_of({.dp_shard = 2, .pp = 2});
      job.model.name = "mlp";
      job.model.hidden = {11, 9, 7, 5, 13};
      job.shard.gather = gather;
      job.pipeline.schedule = schedule_kind(schedule);
      job.train.batch = 48;
      expect_equal_to_one_device(job);
    }
  }
}

TEST(ShardedTraining, APlantedErrorIsFound) {
  for (const Layout& layout :
       parse_layouts({"fsdp=2", "fsdp=2,tp=2", "fsdp=2,pp=2"})) {
    const Job job = job_of(layout);
    for (const char* name : {"conv1.bias", "fc.weight"}) {
      const auto result = result_of(job, {.steps = 1, .plant_error = name});
      EXPECT_FALSE(result.passed);
      EXPECT_EQ(result.worst[0].what, std::string("gradient ") + name);
    }
  }
}

TEST(ShardedTraining, OffloadedStateEqualsOneDevice) {
  for (const auto offload : {Offload::optimizer, Offload::parameters}) {
    for (const Layout& layout :
         parse_layouts({"dp=1", "dp=2", "fsdp=2", "tp=2", "pp=2"})) {
      Job job = job_of(layout);
      job.memory.offload = offload;
      expect_equal_to_one_device(job);
    }
  }
}

const SampleSpec kDigits{.input_shape = {1, 8, 8}, .classes = 10};

// The norm of all gradients, of each layout: what clipping and metrics see.
TEST(ShardedTraining, EachGradientCountsOnceInTheNorm) {
  const auto norm_of = [](const Layout& layout) {
    Job job = job_of(layout);
    job.model.dtype = ModelDtype::float64;
    std::set<double> norms;
    std::mutex mutex;
    on_models(job, [&](World&, const MeshGroups& groups, ParallelModel& model) {
      const torch::NoGradGuard no_grad;
      auto parts = model.parameters();
      std::vector<torch::Tensor> ones;
      for (auto& part : parts) {
        ones.push_back(part.gradient = torch::ones_like(part.value));
      }
      const CountedElements counted(parts, groups.along(Axis::tp).rank());
      const auto shared =
          counted.partition(parts, model.partitioned_gradients()->sum);
      const double norm = gradient_norm(ones, &shared);
      const std::lock_guard lock(mutex);
      norms.insert(norm);
    });
    EXPECT_EQ(norms.size(), 1U) << to_string(layout);
    return *norms.begin();
  };
  Job job;
  const double all =
      static_cast<double>(model_source(job_of({}), kDigits).num_parameters());
  for (const Layout& layout : parse_layouts(
           {"fsdp=2", "fsdp=3", "dp=2,fsdp=2", "fsdp=2,tp=2", "fsdp=2,pp=2",
            "fsdp=2,tp=2,pp=2"})) {
    EXPECT_NEAR(norm_of(layout), std::sqrt(all), 1e-9) << to_string(layout);
  }
}

// No rank ever has more than its shards and a layer.
TEST(ShardedTraining, AModelIsShardedAsItIsBuilt) {
  const auto peak_of = [](const Layout& layout, const std::string& weights) {
    Job job = job_of(layout);
    job.model.name = "mlp";
    job.model.hidden = std::vector<int64_t>(8, 256);
    job.model.weights = weights;
    int64_t peak = 0;
    run_ranks(static_cast<int>(layout.num_ranks()), [&](World& world) {
      const MeshGroups groups(world, layout);
      const ModelSource source = model_source(job, kDigits);
      profiling::MemoryMeter meter;
      std::unique_ptr<ParallelModel> model;
      {
        const auto counting = meter.count();
        model = make_parallel_model(job, {source, world, groups});
      }
      if (world.rank() > 0) return;
      peak = meter.peak().total();
      EXPECT_GT(meter.now().total(), 0);
    });
    return static_cast<double>(peak);
  };
  const double layer = 4 * (256 * 256 + 256);
  const double whole = 7 * layer + 4 * (64 * 256 + 256 + 256 * 10 + 10);
  EXPECT_GE(peak_of({.dp_replicate = 4}, ""), whole);
  TempFolder folder;
  Job job = job_of({});
  job.model.name = "mlp";
  job.model.hidden = std::vector<int64_t>(8, 256);
  job.train.steps = 1;
  run_ranks(1, [&](World& world) { train(job, world, folder.path("")); });
  for (const auto& weights :
       {std::string(), folder.path("checkpoints/last.safetensors")}) {
    const double peak = peak_of({.dp_shard = 4}, weights);
    EXPECT_LT(peak, whole / 4 + 3 * layer) << weights;
    EXPECT_LT(peak, 0.65 * whole) << weights;
  }
}

using ShardedRuns = TrainedRuns;

// Losses, norms, accuracy and the file of weights are those of one device. The
// batch does not divide the held-out samples: the last one has none for some
// rank.
TEST_F(ShardedRuns, FollowTheCurveOfOneDeviceAndSaveFullTensors) {
  const auto job_for = [](const Layout& layout) {
    Job job = job_of(layout);
    job.model.dtype = ModelDtype::float64;
    job.train.steps = 10;
    job.train.log_every = 1;
    job.train.batch = 48;  // 359 held out: 7 batches and 23
    return job;
  };
  const auto one = run(job_for({}), "one");
  const double first_loss =
      timeline::read_metrics(one / "metrics.jsonl").steps[0].loss;
  for (const Layout& layout : parse_layouts(
           {"fsdp=3", "dp=2,fsdp=2", "fsdp=2,tp=2", "fsdp=2,pp=2",
            "fsdp=2,tp=2,pp=2"})) {
    SCOPED_TRACE(to_string(layout));
    const auto folder = run(job_for(layout), to_string(layout));
    expect_same_run(folder, one);
    // Another run, sharded in another way, starts from these weights.
    Job again = job_for({.dp_shard = 2});
    again.train.steps = 1;
    again.model.weights = last_weights(folder);
    EXPECT_LT(steps(again, "again " + to_string(layout))[0].loss, first_loss);
  }
}

TEST_F(ShardedRuns, SomeRanksMayHaveNoSampleToEvaluate) {
  for (const Layout& layout : parse_layouts({"fsdp=4", "fsdp=4,pp=2"})) {
    Job job = job_of(layout);
    job.train.steps = 2;
    job.train.batch = 356;  // of 359 held out 3 remain, for 4 ranks
    if (layout.pp > 1) job.pipeline.microbatches = 1;
    const auto folder = run(job, "empty " + to_string(layout));
    EXPECT_EQ(
        timeline::read_metrics(folder / "metrics.jsonl")
            .evaluations.back()
            .samples,
        359);
  }
}

TEST_F(ShardedRuns, ANanNamesTheLayer) {
  for (const Layout& layout :
       parse_layouts({"fsdp=2", "fsdp=2,pp=2", "fsdp=2,tp=2"})) {
    Job job = job_of(layout);
    job.optimizer.clip_norm = 0;
    job.optimizer.name = OptimizerKind::sgd;
    job.optimizer.learning_rate = 1e38;
    job.train.steps = 20;
    EXPECT_THAT(
        error_text<NumericError>([&] { run(job, to_string(layout)); }),
        HasAll("is not a finite number", "in layer "));
  }
  for (const Layout& layout : parse_layouts({"fsdp=2", "fsdp=2,pp=2"})) {
    const auto body = [](World&, const MeshGroups&, ParallelModel& model) {
      for (const auto& part : model.parameters()) {
        const torch::NoGradGuard no_grad;
        if (part.name == "conv2.weight") part.value.fill_(NAN);
      }
      model.after_update(true);
      expect_nan_found(model, "conv2");
    };
    on_models(job_of(layout), body);
  }
}

// The shard has master parameters in float32; layers compute in 16 bits.
TEST_F(ShardedRuns, ComputeInLowPrecision) {
  Job job = job_of({});
  job.model.name = "mlp";
  job.model.hidden = {64, 32};
  job.optimizer.clip_norm = 0;
  job.optimizer.learning_rate = 3e-3;
  job.train.steps = 60;
  job.train.batch = 48;
  const double expected = steps(job, "float32").back().loss;
  for (const auto compute : {ComputeDtype::bf16, ComputeDtype::fp16}) {
    for (const Layout& layout :
         parse_layouts({"dp=1", "dp=2", "fsdp=2", "pp=2", "fsdp=2,tp=2"})) {
      job.layout = layout;
      job.precision.compute = compute;
      job.precision.reduce = ReduceDtype::float32;
      const auto folder =
          run(job, to_string(compute) + " " + to_string(layout));
      const double loss =
          timeline::read_metrics(folder / "metrics.jsonl").steps.back().loss;
      EXPECT_NEAR(loss, expected, 0.1)
          << to_string(compute) << " " << to_string(layout);
      const safetensors::File file(
          (folder / "checkpoints/last.safetensors").string());
      for (const auto& tensor : file.tensors()) {
        EXPECT_EQ(tensor.dtype, "F32") << tensor.name;
      }
    }
  }
}

TEST_F(ShardedRuns, OverflowsAreSkippedByAllRanks) {
  for (const Layout& layout :
       parse_layouts({"dp=1", "fsdp=2", "fsdp=2,pp=2"})) {
    Job job = job_of(layout);
    job.model.name = "mlp";
    job.model.hidden = {64, 32};
    job.precision.compute = ComputeDtype::fp16;
    job.precision.initial_loss_scale = 0x1p40;  // the first steps overflow
    job.precision.max_overflows = 60;
    job.optimizer.learning_rate = 3e-3;
    job.optimizer.clip_norm = 0;
    job.train.steps = 60;
    job.train.batch = 48;
    const auto done = steps(job, "overflow " + to_string(layout));
    EXPECT_NEAR(done[5].loss, std::log(10), 0.1);
    EXPECT_LT(done.back().loss, 2.2) << to_string(layout);
    job.precision.max_overflows = 4;
    EXPECT_THAT(
        error_text<NumericError>(
            [&] { run(job, "stop " + to_string(layout)); }),
        HasSubstr("4 steps in a row"));
  }
}

}  // namespace echelon::sharded_training_test
