#include "echelon/planner/search.h"

#include <algorithm>
#include <limits>

#include "echelon/planner/memory_fitter.h"
#include "echelon/planner/time_bounds.h"

namespace echelon {
namespace {

struct BoundedGroup {
  Strategy strategy;
  double microbatch_seconds = 0;
  double bound = 0;
};

std::vector<BoundedGroup> bounded_groups(const SearchJob& job) {
  MicrobatchTimes times(job);
  std::vector<BoundedGroup> groups;
  for (const Strategy& group : list_groups(job)) {
    const double seconds = times.of(group);
    Strategy without_bubble = group;
    without_bubble.schedule = "zb-v";
    groups.push_back(
        {group, seconds, lower_bound_seconds(without_bubble, seconds)});
  }
  std::stable_sort(groups.begin(), groups.end(), [](const auto& a, const auto& b) {
    return a.bound < b.bound;
  });
  return groups;
}

struct BoundedVariant {
  Strategy strategy;
  double bound = 0;
};

std::vector<BoundedVariant>
bounded_variants(const SearchJob& job, const BoundedGroup& group) {
  std::vector<BoundedVariant> variants;
  for (const Strategy& variant : list_variants(job, group.strategy)) {
    variants.push_back(
        {variant, lower_bound_seconds(variant, group.microbatch_seconds)});
  }
  std::stable_sort(
      variants.begin(), variants.end(),
      [](const auto& a, const auto& b) { return a.bound < b.bound; });
  return variants;
}

// Whether the rank's state alone is too much, even with what may be offloaded.
bool cannot_fit(
    const SearchJob& job, Strategy variant, double usable, bool offload) {
  variant.offload_optimizer = offload && job.constraints.allow("offload", 1);
  return least_bytes(job.model, variant) > usable;
}

SearchResult search(const SearchJob& job, int64_t keep, bool offload) {
  SearchResult result;
  Ranking ranking(keep);
  MemoryFitter fitter(job, offload);
  PipelineTimes pipelines;
  const double usable = most_usable_bytes(job.cluster);
  std::optional<Strategy> smallest;
  double smallest_bytes = std::numeric_limits<double>::infinity();
  for (const auto& group : bounded_groups(job)) {
    const auto variants = bounded_variants(job, group);
    result.considered += static_cast<int64_t>(variants.size());
    for (const auto& variant : variants) {
      const double limit = ranking.limit_seconds(variant.strategy.layout);
      if (std::max(variant.bound, pipelines.at_least(variant.strategy)) >= limit) {
        ++result.pruned_time;
        continue;
      }
      if (cannot_fit(job, variant.strategy, usable, offload)) {
        ++result.pruned_memory;
        const double bytes = least_bytes(job.model, variant.strategy);
        if (bytes < smallest_bytes) {
          smallest_bytes = bytes;
          smallest = variant.strategy;
        }
        continue;
      }
      const auto fitted = fitter.fit(variant.strategy, limit);
      if (fitted) ranking.enter(*fitted);
      if (fitter.plain()) pipelines.learn(*fitter.plain());
    }
  }
  result.best = ranking.sorted();
  if (result.best.empty()) {
    if (smallest) fitter.fit(*smallest, std::numeric_limits<double>::infinity());
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
