// Steps whose loss or gradients are not finite, and [train] on_non_finite.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "echelon/checkpoint/memory/memory_slots.h"
#include "echelon/explain/explain.h"
#include "echelon/text/text_file.h"
#include "echelon/timeline/rollback.h"
#include "echelon/train/non_finite.h"
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
  Job with_samples(
      Job job, const std::vector<int64_t>& bad, double value,
      int64_t steps = kSteps) {
    torch::manual_seed(1);
    auto inputs = torch::rand({steps * kBatch, 1, 8, 8});
    for (const int64_t step : bad) inputs[step * kBatch - 2].fill_(value);
    job.data.name = DataKind::tensors;
    job.data.path = folder_.path("data.safetensors");
    save_tensors(
        job.data.path,
        {{"inputs", inputs}, {"targets", torch::arange(steps * kBatch) % 10}});
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

  // The job goes back to step 2 from step 7: of the 13 batches of an epoch, it
  // never updates with the third to the seventh.
  Job that_goes_back(Job job, double value) {
    job = with_samples(std::move(job), {4, 5, 6, 7}, value, 13);
    job.train.steps = kStepsBack;
    job.train.on_non_finite = OnNonFinite::rollback;
    job.checkpoint.every_steps = 2;
    return job;
  }
  static constexpr int64_t kStepsBack = 8;
  static inline const std::set<int64_t> kLeftOut = {3, 4, 5, 6, 7};

  // What one device has at the end that never does step `without`: parameters,
  // buffers and optimizer state.
  static SavedValues
  one_device(Job job, int64_t without, const LayerFactory& layers = {}) {
    return one_device(std::move(job), {without}, true, layers);
  }

  // `counts`: a step that is left out counts as a step all the same.
  static SavedValues one_device(
      Job job, const std::set<int64_t>& without, bool counts,
      const LayerFactory& layers) {
    job.layout = {};
    job.shard = {};
    job.pipeline = {};
    job.tensor = {};
    SavedValues values;
    run_ranks(1, [&](World& world) {
      const MeshGroups groups(world, job.layout);
      const TrainingData data = open_data(job.data, job.train.seed);
      const ModelSource source = model_source(job, layers, data.train->spec());
      TrainingState state(job, {source, world, groups}, job.train.steps);
      Loader loader(*data.train, training_batches(job, data, groups));
      loader.start_epoch(0);
      int64_t step = 0;
      for (int64_t number = 1; step < job.train.steps; ++number) {
        const Batch batch = *loader.next();
        if (without.contains(number)) {
          step += counts ? 1 : 0;
          continue;
        }
        state.model().forward_backward(
            batch, counts_units(*data.train, source));
        EXPECT_TRUE(state.update(step++, false, nullptr).updated);
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

// ------------------------------------------------------------- roll-backs

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;

std::vector<timeline::Rollback> rollbacks(const std::filesystem::path& run) {
  return timeline::read_rollbacks(run / "metrics.jsonl");
}

// That of that_goes_back().
timeline::Rollback from_7_to_2(const std::string& why) {
  return {
      .from_step = 7,
      .step = 2,
      .why = why,
      .first = {0, 2 * kBatch},
      .end = {0, 7 * kBatch}};
}

void expect_same_losses(
    const std::vector<timeline::StepMetrics>& steps,
    const std::vector<timeline::StepMetrics>& expected) {
  ASSERT_EQ(steps.size(), expected.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    EXPECT_EQ(steps[i].step, static_cast<int64_t>(i) + 1);
    EXPECT_NEAR(steps[i].loss, expected[i].loss, 1e-12) << i;
  }
}

TEST_F(NonFiniteSteps, AFourthInARowGoesBackAsOnOneDeviceInAllLayouts) {
  const Job base = that_goes_back(small_mlp(), kNan);
  const SavedValues expected = one_device(base, kLeftOut, false, {});
  std::vector<timeline::StepMetrics> losses;
  for (const auto& [name, job] : small_cases(base)) {
    SCOPED_TRACE(name);
    const auto folder = run(job, name);
    expect_saved(folder, expected);
    const auto steps = metrics(folder);
    ASSERT_EQ(std::ssize(steps), kStepsBack);
    EXPECT_EQ(steps.back().skipped_steps, 0);
    if (losses.empty()) losses = steps;
    expect_same_losses(steps, losses);
    const auto all = rollbacks(folder);
    ASSERT_EQ(all.size(), 1U);
    EXPECT_THAT(
        all[0].why, HasAll(
                        "the loss of rank ",
                        " is not a finite number, and 3 steps before it were "
                        "skipped; first NaN or infinity in the input batch"));
    EXPECT_EQ(all[0], from_7_to_2(all[0].why));
  }
}

TEST_F(NonFiniteSteps, ABadGradientGoesBackToo) {
  const LayerList list = layers_with_roots();
  const Job base = that_goes_back(small_mlp(), 0);
  const SavedValues expected =
      one_device(base, kLeftOut, false, whole_layers(list));
  for (const char* layout : {"dp=1", "dp=2", "fsdp=2", "pp=2"}) {
    SCOPED_TRACE(layout);
    Job job = base;
    job.layout = parse_layout(layout);
    const auto folder = run(job, layout, &list);
    expect_saved(folder, expected);
    EXPECT_THAT(
        rollbacks(folder),
        ElementsAre(from_7_to_2(
            "the norm of the gradients is nan, though the loss is finite, and "
            "3 steps before it were skipped")));
  }
}

// Whatever the run is resumed from, and in whatever layout.
TEST_F(NonFiniteSteps, AResumedRunLeavesOutTheSameSamples) {
  Job job = that_goes_back(small_mlp(), kNan);
  job.checkpoint.keep = 9;
  const auto folder = run(job, "run");
  const auto losses = metrics(folder);
  const SavedValues expected = saved_by(folder);
  for (const int64_t step : {6, 2, 0}) {
    for (const char* layout : {"dp=1", "fsdp=2"}) {
      SCOPED_TRACE(step);
      for (const auto& place : list_checkpoints(folder / "checkpoints")) {
        if (place.step > step) std::filesystem::remove_all(place.path);
      }
      job.layout = parse_layout(layout);
      run(job, "run");
      expect_saved(folder, expected);
      expect_same_losses(metrics(folder), losses);
      EXPECT_EQ(rollbacks(folder).size(), 1U);
    }
  }
}

TEST_F(NonFiniteSteps, WhatAnEarlierStateLeavesOutIsTold) {
  testing::internal::CaptureStdout();
  const auto folder = run(that_goes_back(small_mlp(), kNan), "told");
  EXPECT_THAT(
      testing::internal::GetCapturedStdout(),
      HasAll(
          "warning: step 7: the loss of rank 0 is not a finite number, and 3 "
          "steps before it were skipped; first NaN or infinity in the input "
          "batch; training goes back to step 2 of ",
          "step-00000002, and leaves out samples 24 to 83 of epoch 0\n"));
  const std::string told =
      "went back from step 7 to step 2, without samples 24 to 83 of epoch 0: "
      "the loss of rank 0 is not a finite number";
  EXPECT_THAT(explain::explain_run(folder).notes, Contains(HasSubstr(told)));
  EXPECT_THAT(read_text_file(folder / "report.html"), HasSubstr(told));
}

TEST_F(NonFiniteSteps, GoesBackToACopyInMemory) {
  for (const char* layout : {"dp=2", "fsdp=2"}) {
    SCOPED_TRACE(layout);
    MemorySlots memory(2);
    ::setenv("ECHELON_MEMORY", memory.path().c_str(), 1);
    Job job = that_goes_back(small_mlp(), kNan);
    job.layout = parse_layout(layout);
    job.checkpoint.every_steps = 0;
    job.elastic.memory_steps = 1;
    testing::internal::CaptureStdout();
    const auto folder = run(job, layout);
    EXPECT_THAT(
        testing::internal::GetCapturedStdout(),
        HasSubstr("training goes back to step 3 in memory, and leaves out "
                  "samples 36 to 83 of epoch 0"));
    ::unsetenv("ECHELON_MEMORY");
    expect_saved(folder, one_device(job, {4, 5, 6, 7}, false, {}));
    // Nothing of the steps that were undone is left.
    EXPECT_EQ(memory.collect(), kStepsBack);
  }
}

// The state that it went back to may be what leads to bad steps.
TEST_F(NonFiniteSteps, ASecondTimeItGoesBackFurther) {
  Job job = with_samples(
      small_mlp(), {4, 5, 6, 7, 8, 9, 10, 11}, kNan, kStepsBack + 11);
  job.train.steps = kStepsBack;
  job.train.on_non_finite = OnNonFinite::rollback;
  job.checkpoint.every_steps = 1;
  job.layout.dp_replicate = 2;
  const auto folder = run(job, "further");
  const auto all = rollbacks(folder);
  ASSERT_EQ(all.size(), 2U);
  EXPECT_EQ(all[0].step, 3);
  EXPECT_EQ(all[1].step, 2);
  EXPECT_EQ(all[1].end, (timeline::Rollback::Place{0, 11 * kBatch}));
  expect_saved(
      folder, one_device(job, {3, 4, 5, 6, 7, 8, 9, 10, 11}, false, {}));
  EXPECT_TRUE(
      std::filesystem::exists(folder / "checkpoints/damaged-step-00000003"));
}

TEST_F(NonFiniteSteps, GoingBackThreeTimesInARowIsTheEnd) {
  std::vector<int64_t> bad;
  for (int64_t step = 3; step < 30; ++step) bad.push_back(step);
  Job job = with_samples(small_mlp(), bad, kNan, 30);
  job.train.on_non_finite = OnNonFinite::rollback;
  job.checkpoint.every_steps = 2;
  job.layout.dp_shard = 2;
  EXPECT_THAT(
      error_text<NumericError>([&] { run(job, "ends"); }),
      HasAll(
          "step 6: the loss of rank 1 is not a finite number",
          "Training went back 3 times, with less than 100 finite steps after "
          "each"));
  EXPECT_EQ(rollbacks(folder_.path("ends")).size(), 3U);
  // Nor does another process try more often.
  EXPECT_THAT(
      error_text<NumericError>([&] { run(job, "ends"); }),
      HasSubstr("went back 3 times"));
}

TEST_F(NonFiniteSteps, WithoutAStateFromBeforeTheFourthIsTheEnd) {
  Job job = that_goes_back(small_mlp(), kNan);
  job.checkpoint.every_steps = 0;
  job.layout.dp_replicate = 2;
  EXPECT_THAT(
      error_text<NumericError>([&] { run(job, "none"); }),
      HasAll(
          "step 7: the loss of rank 1", "No state from before was saved",
          "set [checkpoint] every_steps"));
}

TEST(GoingBack, IsInARowWithoutAHundredFiniteSteps) {
  const echelon::NonFiniteSteps steps(OnNonFinite::rollback);
  std::vector<timeline::Rollback> before;
  for (const int64_t step : {1000, 1010, 1020}) {
    EXPECT_TRUE(steps.may_go_back(step, before));
    before.push_back({.from_step = step, .step = step - 5});
  }
  EXPECT_FALSE(steps.may_go_back(1030, before));
  EXPECT_FALSE(steps.may_go_back(1115, before));
  EXPECT_TRUE(steps.may_go_back(1116, before));
  EXPECT_FALSE(
      echelon::NonFiniteSteps(OnNonFinite::skip).may_go_back(1116, before));
}

// A bad gradient has made parameters NaN, and they were saved.
TEST_F(NonFiniteSteps, ACheckpointThatIsNotFiniteIsLeftOut) {
  const LayerList list = layers_with_roots();
  for (const char* layout : {"dp=2", "fsdp=2", "pp=2"}) {
    SCOPED_TRACE(layout);
    Job job = with_samples(small_mlp(), {4}, 0);
    job.layout = parse_layout(layout);
    job.train.on_non_finite = OnNonFinite::stop;
    job.checkpoint.every_steps = 1;
    job.checkpoint.async = false;
    const std::string first =
        error_text<NumericError>([&] { run(job, layout, &list); });
    EXPECT_THAT(first, HasSubstr("step 5: the loss of rank "));
    job.train.on_non_finite = OnNonFinite::skip;
    testing::internal::CaptureStderr();
    const auto folder = run(job, layout, &list);
    EXPECT_THAT(
        testing::internal::GetCapturedStderr(),
        HasAll(
            "step-00000004 is damaged and left out: ",
            " has a value that is not finite",
            "step-00000004 is now damaged-step-00000004"));
    EXPECT_EQ(std::ssize(metrics(folder)), kSteps);
    for (const auto& step : metrics(folder)) {
      EXPECT_TRUE(std::isfinite(step.loss)) << step.step;
    }
  }
}

}  // namespace echelon::non_finite_test
