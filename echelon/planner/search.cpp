#include "echelon/planner/search.h"

#include <algorithm>
#include <limits>

#include "echelon/planner/memory_fitter.h"
#include "echelon/planner/pipeline_bound.h"

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
  std::ranges::stable_sort(groups, [](const auto& a, const auto& b) {
    return a.bound.any_partition() < b.bound.any_partition();
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
  std::ranges::stable_sort(
      variants, [](const auto& a, const auto& b) { return a.bound < b.bound; });
  return variants;
}

// Bytes of the rank's state alone, without what may be offloaded.
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
    if (group.bound.any_partition() >=
        ranking.limit_seconds(group.strategy.layout)) {
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

bool is_faster(const Candidate& one, const Candidate& other) {
  if (one.step.step_seconds != other.step.step_seconds) {
    return one.step.step_seconds < other.step.step_seconds;
  }
  return one.step.memory.peak_bytes() < other.step.memory.peak_bytes();
}

Ranking::Key Ranking::key_of(const Layout& layout) {
  return {layout.data_degree(), layout.tp, layout.pp, layout.cp, layout.ep};
}

double Ranking::limit_seconds(const Layout& layout) const {
  const auto at = best_.find(key_of(layout));
  if (at != best_.end()) return at->second.step.step_seconds;
  return best_.size() < keep_ ? std::numeric_limits<double>::infinity()
                              : slowest_->second.step.step_seconds;
}

void Ranking::enter(const Candidate& candidate) {
  const auto [at, is_new] =
      best_.try_emplace(key_of(candidate.strategy.layout), candidate);
  if (!is_new && is_faster(candidate, at->second)) at->second = candidate;
  find_slowest();
  if (best_.size() <= keep_) return;
  best_.erase(slowest_);
  find_slowest();
}

std::vector<Candidate> Ranking::sorted() const {
  std::vector<Candidate> all;
  for (const auto& [key, candidate] : best_) all.push_back(candidate);
  std::ranges::sort(all, is_faster);
  return all;
}

void Ranking::find_slowest() {
  slowest_ = std::ranges::max_element(best_, [](const auto& a, const auto& b) {
    return is_faster(a.second, b.second);
  });
}

SearchResult search(const SearchJob& job, int64_t keep) {
  const bool may = rules_of_framework(job.stack).offload;
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
