// Steps whose loss or gradients are not finite, and [train] on_non_finite.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/support/error_text.h"
#include "tests/train/saving/saved_run.h"
#include "tests/train/trained_runs.h"

namespace echelon::non_finite_test {

constexpr int64_t kSteps = 6;
constexpr int64_t kBatch = 12;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

class NonFiniteSteps : public TrainedRuns {
 protected:
  // The job on samples in order, of which one in each of the steps `bad`, from
  // 1, is filled with `value`: in the second half of the batch, so that of
  // several ranks the last one has it.
  Job with_samples(Job job, const std::vector<int64_t>& bad, double value) {
    torch::manual_seed(1);
    auto inputs = torch::rand({kSteps * kBatch, 1, 8, 8});
    for (const int64_t step : bad) inputs[step * kBatch - 2].fill_(value);
    job.data.name = DataKind::tensors;
    job.data.path = folder_.path("data.safetensors");
    save_tensors(
        job.data.path,
        {{"inputs", inputs}, {"targets", torch::arange(kSteps * kBatch) % 10}});
    job.data.shuffle = false;
    job.data.holdout = 0;
    job.train.batch = kBatch;
    job.train.steps = kSteps;
    job.train.log_every = 1000;
    job.train.on_non_finite = OnNonFinite::skip;
    job.optimizer = {
        .name = OptimizerKind::adamw,
        .learning_rate = 0.01,
        .weight_decay = 0.1,
        .schedule = RateSchedule::linear,
        .warmup_steps = 2};
    return job;
  }

  // What one device has at the end that never does step `without`: parameters,
  // buffers and optimizer state.
  static SavedValues
  one_device(Job job, int64_t without, const LayerFactory& layers = {}) {
    job.layout = {};
    job.shard = {};
    job.pipeline = {};
    job.tensor = {};
    SavedValues values;
    run_ranks(1, [&](World& world) {
      const MeshGroups groups(world, job.layout);
      const TrainingData data = open_data(job.data, job.train.seed);
      const ModelSource source = model_source(job, layers, data.train->spec());
      TrainingState state(job, {source, world, groups}, kSteps);
      Loader loader(*data.train, training_batches(job, data, groups));
      loader.start_epoch(0);
      for (int64_t step = 0; step < kSteps; ++step) {
        const Batch batch = *loader.next();
        if (step + 1 == without) continue;
        state.model().forward_backward(batch, counts_units(*data.train));
        EXPECT_TRUE(state.update(step, false, nullptr).updated);
      }
      const auto keep = [&](const std::string& name, const torch::Tensor& x) {
        values[name] = x.detach().clone();
      };
      for (const auto& x : state.model().parameters()) keep(x.name, x.value);
      for (const auto& x : state.model().buffers()) keep(x.name, x.value);
      for (const auto& [name, x] : state.optimizer().state()) keep(name, x);
    });
    return values;
  }

  static SavedValues saved_by(const std::filesystem::path& run) {
    return read_all(newest(run / "checkpoints"));
  }

  static void
  expect_saved(const std::filesystem::path& run, const SavedValues& expected) {
    const SavedValues saved = saved_by(run);
    EXPECT_EQ(saved.size(), expected.size());
    for (const auto& [name, value] : saved) {
      const auto& other = expected.at(name);
      EXPECT_TRUE(value.allclose(other, 0, 1e-12))
          << name << " differs by up to "
          << (value - other).abs().max().item<double>();
    }
  }

  static std::vector<timeline::StepMetrics>
  metrics(const std::filesystem::path& run) {
    return timeline::read_metrics(run / "metrics.jsonl").steps;
  }
};

TEST_F(NonFiniteSteps, ABadLossIsSkippedAsOnOneDeviceInAllLayouts) {
  const Job base = with_samples(small_mlp(), {3}, kNan);
  const SavedValues expected = one_device(base, 3);
  for (const auto& [name, job] : small_cases(base)) {
    SCOPED_TRACE(name);
    const auto folder = run(job, name);
    expect_saved(folder, expected);
    const auto steps = metrics(folder);
    ASSERT_EQ(std::ssize(steps), kSteps);
    for (const auto& step : steps) {
      EXPECT_EQ(std::isfinite(step.loss), step.step != 3) << step.step;
      EXPECT_EQ(step.grad_norm.has_value(), step.step != 3) << step.step;
      EXPECT_EQ(step.skipped_steps, step.step < 3 ? 0 : 1) << step.step;
    }
  }
}

// The gradient of sqrt(x x) at 0 is not finite, though its value is; only a
// sample of zeros gives 0.
LayerList layers_with_roots() {
  LayerList list;
  list.add_function(
      "flat", [](const torch::Tensor& x) { return x.flatten(1); });
  list.add("in", [] {
    return torch::nn::Linear(torch::nn::LinearOptions(64, 16).bias(false));
  });
  list.add_function(
      "root", [](const torch::Tensor& x) { return (x * x).sqrt(); });
  list.add("out", [] { return torch::nn::Linear(16, 10); });
  return list;
}

TEST_F(NonFiniteSteps, ABadGradientIsSkippedThoughTheLossIsFinite) {
  const LayerList list = layers_with_roots();
  for (const double clip_norm : {0.0, 0.1}) {
    Job base = with_samples(small_mlp(), {4}, 0);
    base.optimizer.clip_norm = clip_norm;
    const SavedValues expected = one_device(base, 4, whole_layers(list));
    for (const char* layout :
         {"dp=1", "dp=2", "fsdp=2", "pp=2", "dp=2,fsdp=2", "fsdp=2,pp=2"}) {
      SCOPED_TRACE(layout);
      Job job = base;
      job.layout = parse_layout(layout);
      const auto folder = run(job, layout + std::to_string(clip_norm), &list);
      expect_saved(folder, expected);
      const auto steps = metrics(folder);
      EXPECT_TRUE(std::isfinite(steps[3].loss));
      EXPECT_FALSE(steps[3].grad_norm);
      EXPECT_EQ(steps[3].skipped_steps, 1);
    }
  }
}

TEST_F(NonFiniteSteps, RunningStatisticsStayAsTheyWere) {
  const LayerList list = own_layers();
  for (const char* layout : {"dp=1", "fsdp=2", "dp=2", "pp=2"}) {
    SCOPED_TRACE(layout);
    Job job = with_samples(small_mlp(), {2}, kNan);
    job.layout = parse_layout(layout);
    const SavedValues expected = one_device(job, 2, whole_layers(list));
    const auto folder = run(job, layout, &list);
    int found = 0;
    for (const auto& [name, values] : saved_by(folder)) {
      if (!name.starts_with("norm.running") &&
          !name.starts_with("norm.num_batches")) {
        continue;
      }
      ++found;
      EXPECT_TRUE(values.isfinite().all().item<bool>()) << name;
      // Ranks and microbatches have statistics of their own samples.
      if (job.layout.num_ranks() > 1) continue;
      EXPECT_TRUE(values.allclose(expected.at(name))) << name;
    }
    EXPECT_EQ(found, 3);
  }
}

TEST_F(NonFiniteSteps, AFourthInARowEndsTheRun) {
  Job job = with_samples(small_mlp(), {2, 3, 4}, kNan);
  job.layout.dp_replicate = 2;
  testing::internal::CaptureStdout();
  const auto folder = run(job, "three");
  const std::string shown = testing::internal::GetCapturedStdout();
  EXPECT_EQ(metrics(folder).back().skipped_steps, 3);
  EXPECT_THAT(
      shown, HasAll(
                 "warning: step 2 is skipped, 1 of at most 3 in a row: the "
                 "loss of rank 1 is not a finite number; parameters are those "
                 "of step 1\n",
                 "step 4 is skipped, 3 of at most 3 in a row"));

  job = with_samples(job, {1, 3, 4, 5, 6}, kNan);
  EXPECT_THAT(
      error_text<NumericError>([&] { run(job, "four"); }),
      HasAll(
          "step 6: the loss of rank 1 is not a finite number, and 3 steps "
          "before it were skipped",
          "the input batch", "Parameters are those of step 5"));
  const LayerList list = layers_with_roots();
  job = with_samples(job, {3, 4, 5, 6}, 0);
  EXPECT_THAT(
      error_text<NumericError>([&] { run(job, "norms", &list); }),
      HasAll("step 6: the norm of the gradients is nan, though the loss is "
             "finite, and 3 steps before it were skipped"));
}

// A resumed run knows which steps were skipped.
TEST_F(NonFiniteSteps, AreCountedInCheckpoints) {
  Job job = with_samples(small_mlp(), {2}, kNan);
  const auto folder = run(job, "counted");
  const CheckpointReader reader(newest(folder / "checkpoints"));
  EXPECT_EQ(reader.manifest().skipped_steps, 1);
  EXPECT_EQ(reader.manifest().step, kSteps);
}

// Activations beyond fp16 say nothing about the loss scale.
TEST_F(NonFiniteSteps, TheLossScaleStaysAsItWas) {
  Job job = with_samples(small_mlp(), {3}, kNan);
  job.model.dtype = ModelDtype::float32;
  job.precision.compute = ComputeDtype::fp16;
  job.precision.initial_loss_scale = 256;
  const auto steps = metrics(run(job, "fp16"));
  ASSERT_EQ(std::ssize(steps), kSteps);
  EXPECT_EQ(steps[2].skipped_steps, 1);
  for (const auto& step : steps) EXPECT_EQ(step.loss_scale, 256);
}

}  // namespace echelon::non_finite_test
