// Complete runs of the training loop in temporary folders, and their
// comparison.
#pragma once

#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <limits>
#include <string>

#include "echelon/checkpoint/tensors/tensor_file.h"
#include "echelon/comm/world.h"
#include "echelon/schedule/options.h"
#include "echelon/timeline/metrics.h"
#include "echelon/train/strategies/parallel_model.h"
#include "echelon/train/trainer.h"
#include "echelon/train/verify.h"
#include "tests/support/temp_folder.h"
#include "tests/train/layouts.h"

namespace echelon {

class TrainedRuns : public testing::Test {
 protected:
  /// Trains `job` with a thread for each rank and passes `layers` to train();
  /// returns the run's folder.
  template <typename... Layers>
  std::filesystem::path
  run(const Job& job, const std::string& name, const Layers&... layers) {
    const std::filesystem::path folder = folder_.make_folder(name);
    run_ranks(static_cast<int>(job.layout.num_ranks()), [&](World& world) {
      train(job, world, folder, layers...);
    });
    return folder;
  }

  std::vector<timeline::StepMetrics>
  steps(const Job& job, const std::string& name) {
    return timeline::read_metrics(run(job, name) / "metrics.jsonl").steps;
  }

  /// The job on data of 32 samples, one batch in order, of which one has NaNs:
  /// of two ranks the second one gets it.
  Job with_broken_sample(Job job) {
    auto inputs = torch::rand({32, 1, 8, 8});
    inputs[20] = std::numeric_limits<float>::quiet_NaN();
    job.data.name = DataKind::tensors;
    job.data.path = folder_.path("data.safetensors");
    save_tensors(
        job.data.path,
        {{"inputs", inputs}, {"targets", torch::arange(32) % 4}});
    job.data.shuffle = false;
    job.data.holdout = 0;
    job.train.batch = 32;
    return job;
  }

  TempFolder folder_;
};

/// Builds the job's model for the digits with a thread for each rank.
inline void on_models(
    const Job& job,
    const std::function<void(World&, const MeshGroups&, ParallelModel&)>& body,
    const LayerFactory& layers = {}) {
  run_ranks(static_cast<int>(job.layout.num_ranks()), [&](World& world) {
    const MeshGroups groups(world, job.layout);
    const ModelSource source =
        model_source(job, layers, {.input_shape = {1, 8, 8}, .classes = 10});
    const auto model = make_parallel_model(job, {source, world, groups});
    body(world, groups, *model);
  });
}

/// The model, which has a NaN in this parameter on some rank, finds it.
inline void expect_nan_found(ParallelModel& model, const std::string& layer) {
  Batch batch;
  batch.inputs = torch::rand({4, 1, 8, 8});
  batch.targets = torch::zeros({4}, torch::kInt64);
  const auto found = model.find_nonfinite(batch);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->layer, layer);
  EXPECT_EQ(found->what, "parameter " + layer + ".weight");
}

/// verify() with a thread for each rank: what rank 0 gets.
inline VerifyResult result_of(
    const Job& job, const VerifyOptions& options = {.steps = 2},
    const LayerFactory& layers = {}) {
  VerifyResult result;
  run_ranks(static_cast<int>(job.layout.num_ranks()), [&](World& world) {
    at::set_num_threads(1);
    const VerifyResult mine = verify(job, world, options, layers);
    if (world.rank() == 0) result = mine;
  });
  return result;
}

/// The job computes what one device computes. Returns the comparisons.
inline int64_t expect_equal_to_one_device(
    const Job& job, const LayerFactory& layers = {}, int64_t steps = 2) {
  const VerifyResult result = result_of(job, {.steps = steps}, layers);
  EXPECT_TRUE(result.passed)
      << to_string(job.layout) << " stage " << job.shard.stage << " "
      << to_string(job.pipeline.schedule) << " gather "
      << to_string(job.shard.gather) << " offload "
      << to_string(job.memory.offload) << " balance "
      << static_cast<int>(job.model.balance) << "\n"
      << to_text(result, {});
  return result.num_compared;
}

inline std::string last_weights(const std::filesystem::path& run) {
  return (run / "checkpoints/last.safetensors").string();
}

/// Losses, norms of gradients and the last evaluation are those of `expected`,
/// and the file of weights has the same full tensors.
inline void expect_same_run(
    const std::filesystem::path& run, const std::filesystem::path& expected,
    double bound = 1e-12) {
  const auto actual = timeline::read_metrics(run / "metrics.jsonl");
  const auto curve = timeline::read_metrics(expected / "metrics.jsonl");
  ASSERT_FALSE(curve.steps.empty());
  ASSERT_EQ(actual.steps.size(), curve.steps.size());
  for (size_t i = 0; i < curve.steps.size(); ++i) {
    const timeline::StepMetrics& step = curve.steps[i];
    EXPECT_NEAR(
        actual.steps[i].loss, step.loss, bound * std::min(1.0, step.loss));
    ASSERT_EQ(
        actual.steps[i].grad_norm.has_value(), step.grad_norm.has_value());
    if (step.grad_norm) {
      EXPECT_NEAR(*actual.steps[i].grad_norm, *step.grad_norm, bound);
    }
  }
  ASSERT_FALSE(actual.evaluations.empty());
  const auto& evaluated = curve.evaluations.back();
  EXPECT_EQ(actual.evaluations.back().samples, evaluated.samples);
  EXPECT_NEAR(actual.evaluations.back().loss, evaluated.loss, bound);
  EXPECT_EQ(actual.evaluations.back().accuracy, evaluated.accuracy);

  const auto saved = load_tensors(last_weights(run));
  const auto weights = load_tensors(last_weights(expected));
  ASSERT_EQ(saved.size(), weights.size());
  for (size_t i = 0; i < saved.size(); ++i) {
    EXPECT_EQ(saved[i].first, weights[i].first);
    EXPECT_TRUE(saved[i].second.allclose(weights[i].second, bound, bound / 10))
        << saved[i].first;
  }
}

/// For tests of every kind of schedule.
inline std::string
schedule_test_name(const testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  std::erase(name, '-');
  return name;
}

}  // namespace echelon
