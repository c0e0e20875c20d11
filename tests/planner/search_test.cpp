// The search against all strategies of a small space, one by one.
#include "echelon/planner/search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <utility>

#include "echelon/planner/axis_orders.h"
#include "echelon/planner/device_sizes.h"
#include "echelon/planner/plan.h"
#include "tests/planner/search_job.h"

namespace echelon::planner::search_test {

// The groups in every order of the axes that the framework supports. On mixed
// clusters list_groups() has them all.
std::vector<cost::Strategy> in_all_orders(const SearchJob& job) {
  if (job.cluster.mixed()) return list_groups(job);
  std::vector<cost::Strategy> groups;
  for (cost::Strategy group : list_groups(job)) {
    for (const int order : rules_of_framework(job.framework).orders) {
      group.layout.order = axis_orders()[static_cast<size_t>(order)];
      groups.push_back(group);
    }
  }
  return groups;
}

// Every group, variant and way to save memory, without bounds or shortcuts.
template <class Visit>
void for_each_strategy(const SearchJob& job, const Visit& visit) {
  for (const auto& group : in_all_orders(job)) {
    for (cost::Strategy strategy : list_variants(job, group)) {
      const int64_t stages =
          strategy.layout.pp * std::max<int64_t>(1, strategy.stages_per_rank);
      const int64_t layers =
          strategy.stage_layers.empty()
              ? (num_layers(job.model) + stages - 1) / stages
              : *std::ranges::max_element(strategy.stage_layers);
      for (const cost::Recompute recompute : cost::kRecomputes) {
        for (int64_t some = -1; some < layers; ++some) {
          if (some == 0 || (some > 0 && recompute == cost::Recompute::none))
            continue;
          strategy.recompute = recompute;
          strategy.recompute_layers = some;
          for (const int offload : {0, 1, 2, 3}) {
            strategy.offload_optimizer = (offload & 1) != 0;
            strategy.offload_activations = (offload & 2) != 0;
            if (offload > 0 && !rules_of_framework(job.framework).offload)
              continue;
            if (cost::check_strategy(job.model, strategy, job.cluster)
                    .empty()) {
              visit(strategy);
            }
          }
        }
      }
    }
  }
}

bool fits(const SearchJob& job, const cost::StepEstimate& step) {
  return step.fits &&
         std::ranges::all_of(
             job.cluster.groups, [&](const cluster::NodeGroup& group) {
               const double all = group.node.host_memory_bytes;
               return all <= 0 ||
                      step.memory.host_bytes <=
                          0.8 * all /
                              static_cast<double>(group.node.num_devices);
             });
}

// Each layout's fastest, found without the search's bounds.
using Fastest = std::map<std::string, Candidate>;

Fastest fastest_of_layouts(const SearchJob& job) {
  Fastest fastest;
  for_each_strategy(job, [&](const cost::Strategy& strategy) {
    // The host's memory is for jobs that do not fit otherwise.
    if (strategy.offload_optimizer || strategy.offload_activations) return;
    const auto step = cost::estimate_step(job.model, strategy, job.cluster);
    if (!fits(job, step)) return;
    Layout layout = strategy.layout;
    layout.dp_replicate *= std::exchange(layout.dp_shard, 1);
    layout.order = kAxes;
    const Candidate candidate{strategy, step};
    const auto [at, is_new] = fastest.try_emplace(to_string(layout), candidate);
    if (!is_new && is_faster(candidate, at->second)) at->second = candidate;
  });
  return fastest;
}

void expect_brute_force_agrees(const SearchJob& job) {
  constexpr size_t kKept = 4;
  std::vector<Candidate> all;
  for (const auto& [name, one] : fastest_of_layouts(job)) all.push_back(one);
  std::ranges::sort(all, is_faster);
  const auto found = search(job, kKept);
  ASSERT_EQ(found.best.size(), std::min(kKept, all.size()));
  ASSERT_FALSE(found.best.empty());
  for (size_t i = 0; i < found.best.size(); ++i) {
    const double best = all[i].step.step_seconds;
    EXPECT_NEAR(found.best[i].step.step_seconds, best, 1e-9 * best)
        << "brute force: " << cost::to_string(all[i].strategy)
        << "\nsearch: " << cost::to_string(found.best[i].strategy);
  }
}

struct Case {
  const char* name;
  const char* model;
  const char* cluster;
  int64_t batch;
  const char* framework = "echelon";
};

class SearchFindsTheBest : public testing::TestWithParam<Case> {};

TEST_P(SearchFindsTheBest, OfAllThatThereIs) {
  const Case& one = GetParam();
  expect_brute_force_agrees(
      search_job(one.model, one.cluster, one.batch, one.framework));
}

INSTANTIATE_TEST_SUITE_P(
    Jobs, SearchFindsTheBest,
    testing::Values(
        Case{"SmallModel", "gpt2", "a100-40gb:4", 8},
        Case{"SeveralOrdersOfTheAxes", "gpt2", "a100-40gb:2x4", 16},
        Case{"TightMemory", "gpt2-xl", "v100:4", 8},
        Case{"ImageNetwork", "resnet18", "a100-40gb:4", 64},
        Case{"Megatron", "gpt2-large", "a100-40gb:8", 16, "megatron-core"},
        Case{"TwoKinds", "gpt2", "a100-40gb:1x2+h100-sxm:1x2", 8},
        Case{"TwoUnequalKinds", "gpt2", "h100-sxm:1x6+v100:1x2", 12},
        Case{"ThreeKinds", "gpt2", "a100-40gb:1x2+h100-sxm:1x2+v100:1x2", 6},
        Case{"TightMemoryOfOneKind", "gpt2-xl", "v100:1x2+a100-80gb:1x2", 8},
        Case{
            "TwoKindsForMegatron", "gpt2-large", "a100-40gb:1x4+h100-sxm:1x4",
            16, "megatron-core"}),
    [](const auto& info) { return info.param.name; });

using Fixed = std::vector<std::pair<std::string, std::string>>;

SearchJob with(SearchJob job, const Fixed& fixed) {
  job.constraints = Constraints(fixed);
  return job;
}

// Some layers must compute again, and as few as will do.
TEST(Search, FindsTheFewestLayersThatMustComputeAgain) {
  for (const auto& [cluster, microbatch] :
       {std::pair{"v100:2", "8"}, std::pair{"v100:1x1+a100-40gb:1x1", "16"}}) {
    const SearchJob job = with(
        search_job("gpt2-xl", cluster, 32),
        {{"schedule", "1f1b"}, {"pp", "2"}, {"microbatch", microbatch}});
    expect_brute_force_agrees(job);
    EXPECT_GT(search(job, 1).best[0].strategy.recompute_layers, 0) << cluster;
  }
}

// Listed once for all groups with one layout, each has its own microbatches.
TEST(Search, VariantsThatAreSharedAreThoseOfTheGroup) {
  const auto job = search_job("gpt2-large", "a100-40gb:1x4+h100-sxm:1x4", 24);
  VariantLists lists(job);
  for (const auto& group : list_groups(job)) {
    const auto alone = list_variants(job, group);
    const auto shared = lists.of(group);
    ASSERT_EQ(shared.size(), alone.size());
    for (size_t i = 0; i < alone.size(); ++i) {
      EXPECT_EQ(to_string(shared[i]), to_string(alone[i]));
      EXPECT_EQ(shared[i].rank_microbatch, alone[i].rank_microbatch);
    }
  }
}

// Strategies that least_bytes excludes cannot fit.
TEST(Search, TheBoundOnMemoryLeavesOutNothingThatFits) {
  SearchJob job = search_job("llama2-7b", "v100:2", 2);
  const double usable = cost::usable_bytes(job.cluster.groups[0].node.device);
  int64_t above = 0;
  for_each_strategy(job, [&](const cost::Strategy& strategy) {
    const double least = cost::least_bytes(job.model, strategy);
    const auto step = cost::estimate_step(job.model, strategy, job.cluster);
    EXPECT_LE(least, step.memory.peak_bytes() * (1 + 1e-9))
        << cost::to_string(strategy);
    if (least <= usable) return;
    ++above;
    EXPECT_FALSE(step.fits) << cost::to_string(strategy);
  });
  EXPECT_GT(above, 0);
}

TEST(Search, KeepsToWhatIsFixed) {
  const auto found = search(
      with(
          search_job("gpt2", "a100-40gb:8", 16),
          {{"tp", "2"}, {"schedule", "gpipe"}, {"pp", "2"}}),
      5);
  ASSERT_FALSE(found.best.empty());
  for (const auto& one : found.best) {
    EXPECT_EQ(one.strategy.layout.tp, 2);
    EXPECT_EQ(one.strategy.layout.pp, 2);
    EXPECT_EQ(one.strategy.schedule, ScheduleKind::gpipe);
  }
}

TEST(Search, ComputesAgainWhatItIsToldThoughAllFits) {
  const auto found = search(
      with(
          search_job("gpt2", "a100-40gb:4", 16),
          Fixed{{"recompute_layers", "2"}}),
      1);
  ASSERT_FALSE(found.best.empty());
  EXPECT_EQ(found.best[0].strategy.recompute_layers, 2);
  EXPECT_NE(found.best[0].strategy.recompute, cost::Recompute::none);
}

TEST(Search, TheHostsMemoryIsALimitToo) {
  SearchJob job = with(
      search_job("llama2-7b", "a100-40gb:1x2+a100-80gb:1x2", 4),
      Fixed{{"offload", "optimizer"}});
  const auto large = search(job, 1);
  ASSERT_FALSE(large.best.empty());
  const double host = large.best[0].step.memory.host_bytes;
  EXPECT_GT(host, 0);
  // The least of all groups of nodes counts.
  job.cluster.groups[0].node.host_memory_bytes = 1e9;
  EXPECT_TRUE(search(job, 1).best.empty());
  job.cluster.groups[0].node.host_memory_bytes = 2 * 1.3 * host;
  job.cluster.groups[1].node.host_memory_bytes = 2 * 1.3 * host;
  EXPECT_FALSE(search(job, 1).best.empty());
}

// Stages that the small device has no room for are the large one's.
TEST(Search, TheLargestDeviceSaysWhatCannotFit) {
  const SearchJob job = with(
      search_job("llama3-8b", "h200:1x1+rtx-4090:1x1", 8),
      {{"pp", "2"}, {"offload", "none"}, {"activations", "keep"}});
  const auto found = search(job, 1);
  ASSERT_FALSE(found.best.empty());
  EXPECT_GT(
      found.best[0].step.memory.peak_bytes(),
      cost::usable_bytes(job.cluster.groups[1].node.device));
}

// The closest plan recomputes everything and needs the least.
TEST(Search, TheClosestNeedsTheLeast) {
  const SearchJob job = with(
      search_job("gpt3-2.7b", "v100:2", 256),
      {{"offload", "none"}, {"activations", "keep"}, {"microbatch", "256"}});
  const auto found = search(job, 1);
  ASSERT_TRUE(found.best.empty());
  ASSERT_TRUE(found.closest);
  EXPECT_FALSE(found.closest->step.fits);
  EXPECT_EQ(found.closest->strategy.recompute, cost::Recompute::all);
  cost::Strategy plain = found.closest->strategy;
  plain.recompute = cost::Recompute::none;
  EXPECT_LT(
      found.closest->step.memory.peak_bytes(),
      estimate_step(job.model, plain, job.cluster).memory.peak_bytes());
}

TEST(Search, ShowsEachLayoutOnceTheFastestFirst) {
  const auto found = search(search_job("gpt2", "a100-40gb:8", 16), 6);
  ASSERT_EQ(found.best.size(), 6u);
  for (size_t i = 1; i < found.best.size(); ++i) {
    EXPECT_LE(
        found.best[i - 1].step.step_seconds, found.best[i].step.step_seconds);
    for (size_t j = 0; j < i; ++j) {
      const Layout& a = found.best[i].strategy.layout;
      const Layout& b = found.best[j].strategy.layout;
      EXPECT_FALSE(
          a.data_degree() == b.data_degree() && a.tp == b.tp && a.pp == b.pp);
    }
  }
}

// 126 layers over 16 ranks: stages of up to 4, 3, 2 and 1 layers. The last are
// 128 stages, with embedding and head in stages of their own.
TEST(ListVariants, StagesOfARankNeedNotDivideTheLayers) {
  const SearchJob job = search_job("llama3.1-405b", "h100-sxm:128", 16);
  std::vector<int64_t> counts;
  for (const auto& variant :
       list_variants(job, strategy_of(job, {.tp = 8, .pp = 16}))) {
    if (variant.schedule == ScheduleKind::interleaved) {
      counts.push_back(variant.stages_per_rank);
    }
  }
  EXPECT_EQ(counts, (std::vector<int64_t>{2, 3, 4, 8}));
}

}  // namespace echelon::planner::search_test
