// What a model with experts evaluates: texts without the router's losses, on
// ranks of which some may have none.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>
#include <vector>

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

}  // namespace echelon::expert_training_test
