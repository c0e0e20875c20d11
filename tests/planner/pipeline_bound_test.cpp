// The bound on a step's time against the estimate of every strategy.
#include "echelon/planner/pipeline_bound.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "echelon/cost/step_estimate.h"
#include "echelon/planner/device_sizes.h"
#include "tests/planner/search_job.h"

namespace echelon::planner::pipeline_bound_test {

// Visits all strategies, with some choices of recompute for each.
template <class Visit>
void for_each_strategy(const SearchJob& job, const Visit& visit) {
  LayerTimes times(job);
  for (const cost::Strategy& group : list_groups(job)) {
    const PipelineBound bound(job, times, group);
    for (cost::Strategy variant : list_variants(job, group)) {
      for (const cost::Recompute recompute : cost::kRecomputes) {
        for (const int64_t layers : {-1, 1, 3}) {
          if (recompute == cost::Recompute::none && layers > 0) continue;
          variant.recompute = recompute;
          variant.recompute_layers = layers;
          if (!cost::check_strategy(job.model, variant, job.cluster).empty())
            continue;
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
  const char* framework;
};

class PipelineBounds : public testing::TestWithParam<Case> {};

TEST_P(PipelineBounds, AreBelowEveryEstimate) {
  const Case& one = GetParam();
  const auto job = search_job(one.model, one.cluster, one.batch, one.framework);
  int64_t number = 0, seen = 0, above = 0;
  for_each_strategy(
      job, [&](const PipelineBound& bound, const cost::Strategy& variant) {
        if (number++ % 11 != 0) return;
        const double seconds =
            cost::estimate_time(job.model, variant, job.cluster).step_seconds;
        ++seen;
        if (bound.of(variant) <= seconds || ++above > 5) return;
        ADD_FAILURE() << cost::to_string(variant) << ": bound "
                      << bound.of(variant) << ", estimate " << seconds;
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
      search_job("gpt3-6.7b", "a100-80gb:1x8+h100-sxm:1x8", 768, "echelon");
  LayerTimes times(job);
  for (const auto& stage_layers :
       std::vector<std::vector<int64_t>>{{}, {10, 22}, {24, 8}}) {
    for (const auto& [recompute, layers] :
         {std::pair{cost::Recompute::none, -1},
          std::pair{cost::Recompute::all, 4},
          std::pair{cost::Recompute::selective, -1}}) {
      cost::Strategy strategy = strategy_of(job, {.tp = 8, .pp = 2}, 768);
      strategy.stage_layers = stage_layers;
      const PipelineBound bound(job, times, strategy);
      strategy.recompute = recompute;
      strategy.recompute_layers = layers;
      const double seconds =
          cost::estimate_time(job.model, strategy, job.cluster).step_seconds;
      EXPECT_GT(bound.of(strategy), 0.97 * seconds)
          << cost::to_string(strategy);
      EXPECT_LE(bound.of(strategy), seconds) << cost::to_string(strategy);
    }
  }
}

// Stages in proportion to the devices are as fast as any: within what layers
// are apart.
TEST(PipelineBound, OfAnyCutIsCloseToTheBestOne) {
  const SearchJob job =
      search_job("gpt3-6.7b", "a100-80gb:1x8+h100-sxm:1x8", 512, "echelon");
  LayerTimes times(job);
  cost::Strategy strategy = strategy_of(job, {.tp = 8, .pp = 2}, 512);
  const PipelineBound bound(job, times, strategy);
  double least = 1e300;
  for (int64_t first = 1; first < 32; ++first) {
    strategy.stage_layers = {first, 32 - first};
    least = std::min(least, bound.of(strategy));
  }
  EXPECT_GT(bound.any_partition(), 0.95 * least);
}

// The best time of two devices for these layers, if they could be partitioned
// anywhere: each device takes the layers that it computes relatively fast.
double best_of_two(const LayerTimes::Sums& one, const LayerTimes::Sums& other) {
  std::vector<std::pair<double, double>> layers = {
      {one.first_both, other.first_both}, {one.last_both, other.last_both}};
  for (size_t i = 1; i < one.both.size(); ++i) {
    layers.emplace_back(
        one.both[i] - one.both[i - 1], other.both[i] - other.both[i - 1]);
  }
  std::ranges::sort(layers, [](const auto& a, const auto& b) {
    return a.first * b.second < b.first * a.second;
  });
  double taken = 0;
  double left = other.total();
  for (const auto& [here, there] : layers) {
    if (taken + here < left - there) {
      taken += here;
      left -= there;
      continue;
    }
    return taken + here * (left - taken) / (here + there);
  }
  return taken;
}

// The head is bound by memory more than the blocks are.
TEST(PipelineBound, OfAnyCutIsBelowTheBestWhereDevicesDifferInWhatTheyDoWell) {
  auto job = search_job("gpt2", "a100-80gb:1x1+h100-sxm:1x1", 32, "echelon");
  job.cluster.groups[1].node.device.memory_bytes_per_second /= 4;
  LayerTimes times(job);
  const cost::Strategy strategy = strategy_of(job, {.pp = 2}, 32);
  const double best =
      32 * best_of_two(
               times.of(strategy, 1, 0, 0, 0), times.of(strategy, 1, 0, 1, 1));
  const double bound = PipelineBound(job, times, strategy).any_partition();
  EXPECT_LE(bound, best);
  EXPECT_GT(bound, 0.85 * best);
}

// Few microbatches: most of the step is what comes before and after them.
TEST(PipelineBound, CountsWhatStagesBeforeARankMustDo) {
  const SearchJob job = search_job("gpt3-1.3b", "h100-sxm:1x8", 8, "echelon");
  LayerTimes times(job);
  cost::Strategy strategy = strategy_of(job, {.pp = 8}, 8);
  const double work = PipelineBound(job, times, strategy).any_partition();
  for (const char* schedule : {"1f1b", "gpipe", "zb-h1"}) {
    strategy.schedule = schedule_kind(schedule);
    const auto step = cost::estimate_time(job.model, strategy, job.cluster);
    const double pipeline =
        step.step_seconds - step.parts.optimizer - step.parts.other;
    const double bound = PipelineBound(job, times, strategy).of(strategy);
    const bool split = strategy.schedule == ScheduleKind::zb_h1;
    EXPECT_GT(bound, (split ? 1.25 : 1.75) * work) << schedule;
    EXPECT_GT(bound, (split ? 0.7 : 0.9) * pipeline) << schedule;
  }
}

}  // namespace echelon::planner::pipeline_bound_test
