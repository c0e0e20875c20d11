// The bound on a step's time against the estimate of every strategy.
#include "echelon/planner/pipeline_bound.h"

#include <gtest/gtest.h>

#include "echelon/cluster/catalogue.h"
#include "echelon/cost/model_catalogue.h"
#include "echelon/cost/step_estimate.h"
#include "echelon/planner/device_sizes.h"

namespace echelon {
namespace {

SearchJob job_of(
    const std::string& model, const std::string& cluster, int64_t batch,
    const std::string& stack) {
  SearchJob job;
  job.model = find_model(model);
  job.cluster = find_cluster(cluster);
  job.devices = job.cluster.num_devices();
  job.global_batch = batch;
  job.seq_len = job.model.seq_len;
  job.stack = stack;
  job.speeds = device_speeds(
      job.model, job.cluster, job.seq_len, job.precision, job.stack);
  return job;
}

// Of all strategies, with some of what each may compute again.
template <class Visit>
void for_each_strategy(const SearchJob& job, const Visit& visit) {
  LayerTimes times(job);
  for (const Strategy& group : list_groups(job)) {
    const PipelineBound bound(job, times, group);
    for (Strategy variant : list_variants(job, group)) {
      for (const Recompute recompute : kRecomputes) {
        for (const int64_t layers : {-1, 1, 3}) {
          if (recompute == Recompute::none && layers > 0) continue;
          variant.recompute = recompute;
          variant.recompute_layers = layers;
          if (!check_strategy(job.model, variant, job.cluster).empty()) continue;
          visit(bound, variant);
        }
      }
    }
  }
}

struct Case {
  const char* model;
  const char* cluster;
  int64_t batch;
  const char* stack;
};

class PipelineBounds : public testing::TestWithParam<Case> {};

TEST_P(PipelineBounds, AreBelowEveryEstimate) {
  const Case& one = GetParam();
  const SearchJob job = job_of(one.model, one.cluster, one.batch, one.stack);
  int64_t number = 0, seen = 0, above = 0;
  for_each_strategy(job, [&](const PipelineBound& bound, const Strategy& variant) {
    if (number++ % 11 != 0) return;
    const double seconds =
        estimate_time(job.model, variant, job.cluster).step_seconds;
    ++seen;
    EXPECT_LE(bound.any_cut(), bound.of(variant));
    if (bound.of(variant) <= seconds || ++above > 5) return;
    ADD_FAILURE() << to_string(variant) << ": bound " << bound.of(variant)
                  << ", estimate " << seconds;
  });
  EXPECT_GT(seen, 100);
}

INSTANTIATE_TEST_SUITE_P(
    Jobs, PipelineBounds,
    testing::Values(
        Case{"gpt2", "a100-40gb:8", 16, "echelon"},
        Case{"gpt2", "a100-40gb:1x4+h100-sxm:1x4", 24, "echelon"},
        Case{"gpt2-large", "h100-sxm:1x6+rtx-4090:1x2", 24, "echelon"},
        Case{"gpt2", "rtx-4090:1x2+a100-80gb:1x2+h100-sxm:1x4", 64, "echelon"},
        Case{"gpt2-large", "a100-40gb:1x4+h100-sxm:1x4", 16, "megatron-core"},
        Case{"gpt2-large", "a100-40gb:1x4+h100-sxm:1x4", 64, "zero-bubble"},
        Case{"mixtral-8x7b", "a100-80gb:1x8+h100-sxm:1x8", 32, "megatron-core"},
        Case{"deepseek-v2-lite", "h100-sxm:1x8+h200:1x8", 32, "deepspeed"},
        Case{"resnet18", "a100-40gb:1x4+h100-sxm:1x4", 64, "echelon"}));

// With nothing but the pipeline in a step, little is left above the bound.
TEST(PipelineBound, IsCloseToWhatAPipelineTakes) {
  const SearchJob job =
      job_of("gpt3-6.7b", "a100-80gb:1x8+h100-sxm:1x8", 512, "echelon");
  LayerTimes times(job);
  for (const auto& stage_layers : std::vector<std::vector<int64_t>>{{}, {10, 22}, {24, 8}}) {
    for (const auto& [recompute, layers] :
         {std::pair{Recompute::none, -1}, std::pair{Recompute::all, 4},
          std::pair{Recompute::selective, -1}}) {
      Strategy strategy;
      strategy.layout = {.tp = 8, .pp = 2};
      strategy.global_batch = 512;
      strategy.seq_len = job.seq_len;
      strategy.stage_layers = stage_layers;
      const PipelineBound bound(job, times, strategy);
      strategy.recompute = recompute;
      strategy.recompute_layers = layers;
      const double seconds =
          estimate_time(job.model, strategy, job.cluster).step_seconds;
      EXPECT_GT(bound.of(strategy), 0.97 * seconds) << to_string(strategy);
      EXPECT_LE(bound.of(strategy), seconds) << to_string(strategy);
    }
  }
}

// Stages in proportion to the devices are as fast as any: within what layers are apart.
TEST(PipelineBound, OfAnyCutIsCloseToTheBestOne) {
  const SearchJob job =
      job_of("gpt3-6.7b", "a100-80gb:1x8+h100-sxm:1x8", 512, "echelon");
  LayerTimes times(job);
  Strategy strategy;
  strategy.layout = {.tp = 8, .pp = 2};
  strategy.global_batch = 512;
  strategy.seq_len = job.seq_len;
  const PipelineBound bound(job, times, strategy);
  double least = 1e300;
  for (int64_t first = 1; first < 32; ++first) {
    strategy.stage_layers = {first, 32 - first};
    least = std::min(least, bound.of(strategy));
  }
  EXPECT_LE(bound.any_cut(), least);
  EXPECT_GT(bound.any_cut(), 0.95 * least);
}

}  // namespace
}  // namespace echelon
