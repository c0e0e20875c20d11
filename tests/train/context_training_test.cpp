// The training loop over cut sequences: what it logs, and what it evaluates.
#include <gtest/gtest.h>

#include "echelon/timeline/metrics.h"
#include "tests/train/small_run.h"
#include "tests/train/trained_runs.h"

namespace echelon::context_training_test {

class ContextTraining : public TrainedRuns {
 protected:
  timeline::MetricsFile metrics(
      const Layout& layout, const ContextParallelOptions& context,
      const std::string& name) {
    Job job = small_gpt(tokens_);
    job.layout = layout;
    job.context = context;
    return timeline::read_metrics(run(job, name) / "metrics.jsonl");
  }

  const std::string tokens_ = write_tokens(folder_);
};

double samples_of(const timeline::StepMetrics& step) {
  return step.samples_per_second * step.step_seconds;
}

// Each rank has losses of its own tokens, and parts of the same samples.
TEST_F(ContextTraining, LogsWhatOneDeviceLogs) {
  const auto one = metrics({}, {}, "one");
  ASSERT_EQ(one.steps.size(), 8u);
  ASSERT_FALSE(one.evaluations.empty());
  const auto expect_same = [&](const char* text,
                               const ContextParallelOptions& context) {
    const std::string name = std::string(text) + " " + to_string(context.way);
    SCOPED_TRACE(name);
    const auto cut = metrics(parse_layout(text), context, name);
    ASSERT_EQ(cut.steps.size(), one.steps.size());
    for (size_t i = 0; i < one.steps.size(); ++i) {
      const auto& step = cut.steps[i];
      EXPECT_NEAR(step.loss, one.steps[i].loss, 1e-9 * one.steps[i].loss);
      EXPECT_NEAR(samples_of(step), samples_of(one.steps[i]), 1e-6);
    }
    ASSERT_EQ(cut.evaluations.size(), one.evaluations.size());
    const auto& last = cut.evaluations.back();
    const auto& expected = one.evaluations.back();
    EXPECT_NEAR(last.loss, expected.loss, 1e-9 * expected.loss);
    EXPECT_EQ(last.samples, expected.samples);
    EXPECT_EQ(last.tokens, expected.tokens);
    EXPECT_EQ(last.accuracy, expected.accuracy);
  };
  for (const auto way :
       {ContextWay::automatic, ContextWay::ring, ContextWay::all_gather,
        ContextWay::ulysses}) {
    expect_same("cp=3", {way});
  }
  expect_same("cp=4", {ContextWay::ulysses_ring, 2});
  for (const char* layout : {"dp=2,cp=2", "fsdp=2,cp=2", "pp=2,cp=2"}) {
    expect_same(layout, {ContextWay::ring});
  }
}

}  // namespace echelon::context_training_test
