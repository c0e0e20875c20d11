#include "echelon/planner/search.h"

#include <algorithm>
#include <limits>

#include "echelon/planner/memory_fitter.h"
#include "echelon/planner/pipeline_bound.h"
#include "echelon/planner/pipeline_times.h"

namespace echelon {
namespace {

struct BoundedGroup {
  Strategy strategy;
  PipelineBound bound;
};

std::vector<BoundedGroup>
bounded_groups(const SearchJob& job, LayerTimes& times) {
  std::vector<BoundedGroup> groups;
  for (const Strategy& group : list_groups(job)) {
    groups.push_back({group, PipelineBound(job, times, group)});
  }
  std::stable_sort(
      groups.begin(), groups.end(), [](const auto& a, const auto& b) {
        return a.bound.any_cut() < b.bound.any_cut();
      });
  return groups;
}

struct BoundedVariant {
  Strategy strategy;
  double bound = 0;
};

bool same_pipeline(const Strategy& one, const Strategy& other) {
  return one.schedule == other.schedule &&
         one.stages_per_rank == other.stages_per_rank &&
         one.stage_layers == other.stage_layers;
}

std::vector<BoundedVariant>
bounded_variants(const PipelineBound& bound, std::vector<Strategy> strategies) {
  std::vector<BoundedVariant> variants;
  for (Strategy& strategy : strategies) {
    const bool known =
        !variants.empty() && same_pipeline(variants.back().strategy, strategy);
    const double seconds = known ? variants.back().bound : bound.of(strategy);
    variants.push_back({std::move(strategy), seconds});
  }
  std::stable_sort(
      variants.begin(), variants.end(),
      [](const auto& a, const auto& b) { return a.bound < b.bound; });
  return variants;
}

// Of the rank's state alone, with what may be offloaded on the host.
double
least_state_bytes(const SearchJob& job, const Strategy& variant, bool offload) {
  if (!offload || !job.constraints.allow("offload", 1)) {
    return least_bytes(job.model, variant);
  }
  Strategy offloaded = variant;
  offloaded.offload_optimizer = true;
  return least_bytes(job.model, offloaded);
}

SearchResult search(const SearchJob& job, int64_t keep, bool offload) {
  SearchResult result;
  Ranking ranking(keep);
  MemoryFitter fitter(job, offload);
  PipelineTimes pipelines;
  const double usable = most_usable_bytes(job.cluster);
  std::optional<Strategy> smallest;
  double smallest_bytes = std::numeric_limits<double>::infinity();
  LayerTimes times(job);
  VariantLists lists(job);
  for (const auto& group : bounded_groups(job, times)) {
    const auto number = static_cast<int64_t>(lists.like(group.strategy).size());
    result.considered += number;
    if (group.bound.any_cut() >= ranking.limit_seconds(group.strategy.layout)) {
      result.pruned_time += number;
      continue;
    }
    for (const auto& variant :
         bounded_variants(group.bound, lists.of(group.strategy))) {
      const double limit = ranking.limit_seconds(variant.strategy.layout);
      if (std::max(variant.bound, pipelines.at_least(variant.strategy)) >=
          limit) {
        ++result.pruned_time;
        continue;
      }
      const double bytes = least_state_bytes(job, variant.strategy, offload);
      if (bytes > usable) {
        ++result.pruned_memory;
        if (bytes < smallest_bytes) {
          smallest_bytes = bytes;
          smallest = variant.strategy;
        }
        continue;
      }
      const auto fitted = fitter.fit(variant.strategy, group.bound, limit);
      if (fitted) ranking.enter(*fitted);
      if (fitter.plain()) pipelines.learn(*fitter.plain());
    }
  }
  result.best = ranking.sorted();
  if (result.best.empty()) {
    if (smallest) {
      fitter.fit(
          *smallest, PipelineBound(job, times, *smallest),
          std::numeric_limits<double>::infinity());
    }
    result.closest = fitter.closest();
  }
  result.estimated = fitter.estimated();
  return result;
}

}  // namespace

SearchResult search(const SearchJob& job, int64_t keep) {
  const bool may = rules_of_stack(job.stack).offload;
  const bool asked =
      job.constraints.says("offload") || job.constraints.says("activations");
  SearchResult result = search(job, keep, may && asked);
  if (!result.best.empty() || !may || asked || result.considered == 0) {
    return result;
  }
  SearchResult offloaded = search(job, keep, true);
  offloaded.estimated += result.estimated;
  return offloaded;
}

}  // namespace echelon
