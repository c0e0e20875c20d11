// What a model with experts evaluates: texts without the router's losses, on
// ranks of which some may have none.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>
#include <string>
#include <vector>

#include "echelon/timeline/metrics.h"
#include "echelon/train/trainer.h"
#include "tests/support/temp_folder.h"
#include "tests/train/composition_cases.h"
#include "tests/train/small_run.h"

namespace echelon::expert_training_test {

Batch three_texts() {
  Batch batch;
  batch.inputs = torch::arange(33).view({3, 11}) * 7 % 61;
  batch.targets = (batch.inputs + 3) % 61;
  batch.global_count = 3;
  return batch;
}

// Evaluates the texts, of which rank `i` of the data has `counts[i]`.
Score::Totals evaluated(const Job& job, const std::vector<int64_t>& counts) {
  Score::Totals all;
  std::mutex mutex;
  on_ranks(job, [&](SmallRun& run) {
    const auto own = static_cast<size_t>(run.groups.data_index());
    int64_t begin = 0;
    for (size_t i = 0; i < own; ++i) begin += counts[i];
    const auto totals =
        run.state.model()
            .evaluate(piece_of(three_texts(), begin, counts[own]))
            .totals();
    const std::lock_guard lock(mutex);
    all.loss_sum += totals.loss_sum;
    all.count += totals.count;
    all.correct += totals.correct;
    all.samples += totals.samples;
  });
  return all;
}

TEST(ExpertTraining, EvaluatesTheSameWhereSomeRanksHaveNoText) {
  TempFolder folder;
  Job job = small_gpt(write_tokens(folder));
  job.model = composition::mixture("mixtral");
  job.model.dtype = ModelDtype::float64;
  job.model.vocab_size = job.data.vocab_size;
  const auto plain = [&] {
    Job other = job;
    other.model.aux_loss = other.model.z_loss = 0;
    return evaluated(other, {3});
  }();
  EXPECT_EQ(plain.count, 33);
  const auto expect_same = [&](const char* layout,
                               const std::vector<int64_t>& counts) {
    SCOPED_TRACE(layout);
    job.layout = parse_layout(layout);
    if (job.layout.pp > 1) job.pipeline.microbatches = 1;
    const auto totals = evaluated(job, counts);
    EXPECT_NEAR(totals.loss_sum, plain.loss_sum, 1e-10 * plain.loss_sum);
    EXPECT_EQ(totals.count, plain.count);
    EXPECT_EQ(totals.correct, plain.correct);
    EXPECT_EQ(totals.samples, 3);
  };
  expect_same("dp=1", {3});
  expect_same("ep=2", {3, 0});
  expect_same("dp=2,ep=2", {0, 2, 0, 1});
  expect_same("tp=2,ep=2", {0, 3});
  expect_same("fsdp=2,ep=2", {1, 0, 2, 0});
  expect_same("pp=2,ep=2", {0, 3});
}

// The steps of a run, and what it says.
struct Told {
  std::vector<timeline::StepMetrics> steps;
  std::string text;
};

Told trained(const Job& job) {
  const TempFolder folder;
  testing::internal::CaptureStdout();
  run_ranks(static_cast<int>(job.layout.num_ranks()), [&](World& world) {
    train(job, world, folder.path());
  });
  Told told{{}, testing::internal::GetCapturedStdout()};
  told.steps = timeline::read_metrics(folder.path("metrics.jsonl")).steps;
  return told;
}

Job counted_job(TempFolder& folder, const ModelOptions& model) {
  Job job = small_gpt(write_tokens(folder));
  job.model = model;
  job.model.dtype = ModelDtype::float64;
  job.model.vocab_size = job.data.vocab_size;
  job.train.steps = 3;
  job.train.log_every = 2;
  job.checkpoint.at_end = false;
  return job;
}

// 8 samples of 11 tokens, of which each chooses two experts.
constexpr int64_t kChoices = 8 * 11 * 2;

TEST(ExpertTraining, LoadsAreThoseOfOneDevice) {
  TempFolder folder;
  for (const bool biased : {false, true}) {
    ModelOptions model =
        biased ? composition::deepseek() : composition::mixture("qwen3-moe");
    model.aux_loss = model.z_loss = 0;
    Job job = counted_job(folder, model);
    const auto expected = trained(job).steps;
    ASSERT_EQ(expected.size(), 3u);
    EXPECT_EQ(expected[0].expert_loads.size(), 2u);
    EXPECT_EQ(
        expected[0].expert_loads.at(1).layer,
        biased ? "model.layers.2.mlp" : "model.layers.1.mlp");
    EXPECT_EQ(expected[1].expert_loads.size(), 2u);
    EXPECT_TRUE(expected[2].expert_loads.empty());
    for (const auto& step : expected) {
      EXPECT_GE(step.expert_imbalance.value_or(0), 1);
      EXPECT_FALSE(step.dropped_share);
      for (const auto& layer : step.expert_loads) {
        EXPECT_EQ(layer.total(), biased ? kChoices / 2 * 3 : kChoices);
        EXPECT_TRUE(layer.dropped.empty());
      }
    }
    EXPECT_EQ(
        expected[1].expert_imbalance,
        timeline::imbalance_of(expected[1].expert_loads));
    for (const char* layout : {"dp=2", "tp=2", "pp=2", "fsdp=2,ep=2", "cp=2"}) {
      if (biased && layout == std::string("cp=2")) continue;
      SCOPED_TRACE(layout);
      job.layout = parse_layout(layout);
      job.memory.recompute =
          job.layout.ep > 1 ? Recompute::all : Recompute::none;
      const auto own = trained(job).steps;
      ASSERT_EQ(own.size(), expected.size());
      for (size_t i = 0; i < own.size(); ++i) {
        EXPECT_EQ(own[i].expert_imbalance, expected[i].expert_imbalance);
        EXPECT_EQ(own[i].expert_loads, expected[i].expert_loads);
      }
    }
  }
}

TEST(ExpertTraining, DropsAreCountedAndTold) {
  TempFolder folder;
  ModelOptions model = composition::mixture("mixtral");
  model.capacity_factor = 0.6;
  Job job = counted_job(folder, model);
  const auto told = trained(job);
  // An expert takes 3 tokens of a sample.
  constexpr int64_t kMost = 8 * 3;
  const auto& step = told.steps.at(0);
  int64_t dropped = 0;
  for (const auto& layer : step.expert_loads) {
    for (size_t i = 0; i < layer.chosen.size(); ++i) {
      const int64_t here = layer.dropped.at(i);
      EXPECT_LE(layer.chosen[i] - here, kMost);
      dropped += here;
    }
  }
  EXPECT_GE(dropped, 2 * (kChoices - 5 * kMost));
  EXPECT_DOUBLE_EQ(
      step.dropped_share.value_or(0),
      static_cast<double>(dropped) / (2 * kChoices));
  const std::string warning = "of the choices of experts were dropped";
  const size_t at = told.text.find(warning);
  ASSERT_NE(at, std::string::npos) << told.text;
  EXPECT_EQ(told.text.find(warning, at + 1), std::string::npos);
  EXPECT_NE(
      told.text.find(
          "most of them by " + timeline::most_dropped(step.expert_loads) +
          "; raise [model] capacity_factor = 0.6 or aux_loss"),
      std::string::npos)
      << told.text;
  job.layout = parse_layout("tp=2,ep=2");
  const auto cut = trained(job).steps;
  for (size_t i = 0; i < cut.size(); ++i) {
    EXPECT_EQ(cut[i].dropped_share, told.steps[i].dropped_share);
    EXPECT_EQ(cut[i].expert_loads, told.steps[i].expert_loads);
  }
  // An evaluation drops nothing.
  const auto loss = evaluated(job, {1, 2}).loss_sum;
  job.model.capacity_factor = 0;
  EXPECT_EQ(evaluated(job, {1, 2}).loss_sum, loss);
  // Room for all.
  job.model.capacity_factor = 5;
  const auto wide = trained(job);
  EXPECT_EQ(wide.steps.at(0).dropped_share, 0);
  EXPECT_EQ(wide.text.find(warning), std::string::npos);
}

}  // namespace echelon::expert_training_test
