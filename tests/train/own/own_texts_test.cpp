// Texts, a loss and metrics of one's own with Echelon's language models: each
// layout gives what one device gives, where ranks have shards of the scores,
// parts of each text or other experts.
#include <gmock/gmock.h>

#include "echelon/train/strategies/count_job.h"
#include "tests/train/small_run.h"
#include "tests/train/trained_runs.h"

namespace echelon::own_texts_test {

using torch::Tensor;
namespace F = torch::nn::functional;

constexpr int64_t kLength = 11;
constexpr int64_t kVocabulary = 67;

// Each token has a weight, some of them 0.
class Texts : public Dataset {
 public:
  int64_t size() const override { return 40; }
  SampleSpec spec() const override {
    return {
        .input_shape = {kLength},
        .input_dtype = torch::kInt64,
        .target_shape = {kLength},
        .classes = kVocabulary,
        .more_targets = {{{kLength}, torch::kFloat64}}};
  }
  Sample sample(int64_t index, const SampleContext&) const override {
    const auto at = torch::arange(kLength + 1) + 5 * index;
    const auto ids = (at * at * 7 + at.div(3, "floor")) % kVocabulary;
    return {
        .input = ids.slice(0, 0, kLength),
        .target = ids.slice(0, 1),
        .more_targets = {(ids.slice(0, 1) % 4).to(torch::kFloat64) / 2}};
  }
};

Tensor entropies(const Tensors& outputs, const Tensors& targets) {
  return F::cross_entropy(
      outputs[0].transpose(1, 2), targets[0],
      F::CrossEntropyFuncOptions()
          .reduction(torch::kNone)
          .label_smoothing(0.1));
}

class WeightedTokens : public Objective {
 public:
  Tensor loss_sum(
      const Tensors& outputs, const Tensors& targets,
      const BatchRanks&) const override {
    return (entropies(outputs, targets) * targets[1]).sum();
  }
  std::variant<int64_t, Tensor> count(const Tensors& targets) const override {
    return targets[1].sum();
  }
  bool counts_units() const override { return true; }
  bool counts_tokens() const override { return true; }
  Tensor
  count_correct(const Tensors& outputs, const Tensors& targets) const override {
    return outputs[0].argmax(-1).eq(targets[0]).sum();
  }
};

// A mean over texts, not over tokens.
class EachText : public Objective {
 public:
  Tensor loss_sum(
      const Tensors& outputs, const Tensors& targets,
      const BatchRanks&) const override {
    return entropies(outputs, targets).sum();
  }
};

class OwnTexts : public TrainedRuns {
 protected:
  OwnParts parts(std::shared_ptr<const Objective> objective) const {
    return {
        .dataset = std::make_shared<Texts>(),
        .objective = std::move(objective),
        .metrics = {
            {.name = "largest",
             .sums = [](const Tensors& outputs, const Tensors&) {
               return std::get<0>(outputs[0].max(-1)).sum();
             }}}};
  }
  Job job(const std::string& layout) const {
    Job job;
    job.layout = parse_layout(layout);
    job.model = tiny_gpt();
    job.model.dtype = ModelDtype::float64;
    job.data.name = DataKind::own;
    job.data.holdout = 0.25;
    job.train.batch = 8;
    job.train.steps = 5;
    job.optimizer.name = OptimizerKind::sgd;
    job.optimizer.learning_rate = 0.05;
    if (job.layout.pp > 1) job.pipeline.microbatches = 2;
    return job;
  }
  void expect_as_one_device(
      const OwnParts& own, const std::vector<std::string>& layouts,
      const std::function<void(Job&)>& change = [](Job&) {}) {
    Job alone = job("dp=1");
    change(alone);
    const auto expected = run(alone, "alone", own);
    for (const std::string& layout : layouts) {
      SCOPED_TRACE(layout);
      Job other = job(layout);
      change(other);
      const auto folder = run(other, layout, own);
      expect_same_run(folder, expected, 1e-10);
      const auto value = [](const std::filesystem::path& run) {
        return timeline::read_metrics(run / "metrics.jsonl")
            .evaluations.back()
            .own.at(0)
            .second;
      };
      EXPECT_NEAR(value(folder), value(expected), 1e-10);
    }
  }
};

TEST_F(OwnTexts, WeightsOfTokensInEveryLayout) {
  expect_as_one_device(
      parts(std::make_shared<WeightedTokens>()),
      {"dp=2", "tp=2", "tp=3", "cp=2", "cp=3", "pp=2", "fsdp=2,cp=2",
       "tp=2,cp=2", "tp=2,pp=2", "cp=2,pp=2"});
}

TEST_F(OwnTexts, AMeanOverTextsInEveryLayout) {
  expect_as_one_device(
      parts(std::make_shared<EachText>()),
      {"dp=2", "tp=2", "cp=2", "dp=2,cp=2", "cp=2,pp=2"});
}

TEST_F(OwnTexts, WithExpertsSpreadOverRanks) {
  expect_as_one_device(
      parts(std::make_shared<WeightedTokens>()),
      {"fsdp=2,ep=2", "tp=2,ep=2", "dp=2,ep=2"}, [](Job& job) {
        job.model.name = "mixtral";
        job.model.hidden_size = 24;
        job.model.heads = 6;
        job.model.kv_heads = 2;
        job.model.intermediate_size = 15;
        job.model.experts = 5;
        job.model.experts_per_token = 2;
      });
}

TEST_F(OwnTexts, VerifyPasses) {
  for (const char* layout : {"tp=2", "cp=2", "fsdp=2,cp=2"}) {
    const Job one = job(layout);
    run_ranks(static_cast<int>(one.layout.num_ranks()), [&](World& world) {
      const auto result = verify(
          one, world, {.steps = 2}, parts(std::make_shared<WeightedTokens>()));
      EXPECT_TRUE(result.passed) << layout << "\n" << to_text(result, {});
    });
  }
}

TEST_F(OwnTexts, WhatARankHoldsIsCounted) {
  const auto own = parts(std::make_shared<WeightedTokens>());
  for (const char* layout : {"tp=2", "cp=2"}) {
    EXPECT_GT(count_memory(job(layout), own).layers.size(), 3U) << layout;
  }
}

}  // namespace echelon::own_texts_test
