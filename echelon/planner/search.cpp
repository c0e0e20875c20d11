#include "echelon/planner/search.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <tuple>

#include "echelon/error.h"
#include "echelon/schedule/options.h"

namespace echelon {
namespace {

constexpr double kForever = std::numeric_limits<double>::infinity();
constexpr double kEvenStages = 0.9;
constexpr double kHostShare = 0.8;  // of the host's memory, for offloading

// Of the (pp - 1) microbatches that 1F1B waits for, the part that remains.
double bubble_share(const std::string& schedule, int64_t stages_per_rank) {
  if (schedule == "gpipe" || schedule == "1f1b") return 1;
  if (schedule == "interleaved" || schedule == "breadth_first") {
    const double stages = static_cast<double>(
        stages_per_rank > 0 ? stages_per_rank : stages_per_rank_of(schedule));
    return 1 / stages;
  }
  return 0;
}

// A layout, for those who choose between layouts.
using LayoutKey = std::array<int64_t, 5>;
LayoutKey key_of(const Layout& layout) {
  return {layout.data_degree(), layout.tp, layout.pp, layout.cp, layout.ep};
}

bool faster(const Candidate& one, const Candidate& other) {
  if (one.step.step_seconds != other.step.step_seconds) {
    return one.step.step_seconds < other.step.step_seconds;
  }
  return one.step.memory.peak_bytes() < other.step.memory.peak_bytes();
}

// The fastest of each layout, of the `keep` fastest layouts.
class Ranking {
 public:
  explicit Ranking(int64_t keep) : keep_(static_cast<size_t>(keep)) {}

  // What is not below cannot enter.
  double limit_seconds(const Layout& layout) const {
    const auto at = best_.find(key_of(layout));
    if (at != best_.end()) return at->second.step.step_seconds;
    return best_.size() < keep_ ? kForever : slowest_->second.step.step_seconds;
  }

  void enter(const Candidate& candidate) {
    const auto [at, is_new] =
        best_.try_emplace(key_of(candidate.strategy.layout), candidate);
    if (!is_new && faster(candidate, at->second)) at->second = candidate;
    find_slowest();
    if (best_.size() <= keep_) return;
    best_.erase(slowest_);
    find_slowest();
  }

  std::vector<Candidate> sorted() const {
    std::vector<Candidate> all;
    for (const auto& [key, candidate] : best_) all.push_back(candidate);
    std::sort(all.begin(), all.end(), faster);
    return all;
  }

 private:
  void find_slowest() {
    slowest_ = std::max_element(
        best_.begin(), best_.end(),
        [](const auto& a, const auto& b) { return faster(a.second, b.second); });
  }

  size_t keep_;
  std::map<LayoutKey, Candidate> best_;
  std::map<LayoutKey, Candidate>::iterator slowest_;
};

double most_usable_bytes(const Cluster& cluster) {
  double most = 0;
  for (const auto& group : cluster.groups) {
    most = std::max(most, usable_bytes(group.node.device));
  }
  return most;
}

// Of the host's memory, what each device may use; where it is not known, anything.
double least_host_bytes(const Cluster& cluster) {
  double least = kForever;
  for (const auto& group : cluster.groups) {
    if (group.node.host_memory_bytes <= 0) continue;
    least = std::min(
        least, kHostShare * group.node.host_memory_bytes /
                   static_cast<double>(group.node.num_devices));
  }
  return least;
}

// What lies beside a strategy's parameters in memory, and where.
struct Saver {
  bool offload_optimizer = false;
  bool offload_activations = false;
  Recompute recompute = Recompute::none;
};

// `offload`: whether the host's memory may be used.
std::vector<Saver> list_savers(const SearchJob& job, bool offload) {
  std::vector<Saver> savers;
  for (int64_t optimizer = 0; optimizer <= 1; ++optimizer) {
    for (int64_t activations = 0; activations <= 1; ++activations) {
      if (!offload && optimizer + activations > 0) continue;
      if (!job.constraints.allow("offload", optimizer)) continue;
      if (!job.constraints.allow("activations", activations)) continue;
      for (const Recompute recompute : kRecomputes) {
        const bool none = recompute == Recompute::none;
        if (none && !job.constraints.allow("recompute_layers", -1)) continue;
        // What lies on the host need not be computed again.
        if (activations == 1 && recompute == Recompute::selective) continue;
        if (!job.constraints.allow("recompute", static_cast<int64_t>(recompute))) {
          continue;
        }
        savers.push_back({optimizer == 1, activations == 1, recompute});
      }
    }
  }
  return savers;
}

// Finds the fastest way to make one strategy fit.
class Fitter {
 public:
  Fitter(const SearchJob& job, bool offload)
      : job_(job),
        savers_(list_savers(job, offload)),
        partial_selective_(rules_of_stack(job.stack).partial_selective),
        host_bytes_(least_host_bytes(job.cluster)),
        usable_bytes_(most_usable_bytes(job.cluster)) {}

  int64_t estimated() const { return estimated_; }
  // Of the last strategy before memory was saved; empty when that was not tried.
  const std::optional<Candidate>& plain() const { return plain_; }
  const std::optional<Candidate>& closest() const { return closest_; }

  // Empty when it does not fit or is not below `limit_seconds`.
  std::optional<Candidate> fit(const Strategy& strategy, double limit_seconds) {
    best_.reset();
    limit_ = limit_seconds;
    fitted_.clear();
    too_slow_ = false;
    plain_.reset();
    for (const Saver& saver : savers_) {
      if (too_slow_) break;  // saving memory only adds time
      if (needless(saver)) continue;
      Strategy saved = strategy;
      saved.offload_optimizer = saver.offload_optimizer;
      saved.offload_activations = saver.offload_activations;
      saved.recompute = saver.recompute;
      if (!try_saver(saved)) continue;
      fitted_.push_back(saver);
    }
    return best_;
  }

 private:
  // Whether something fits that does less.
  bool needless(const Saver& saver) const {
    return std::any_of(fitted_.begin(), fitted_.end(), [&](const Saver& less) {
      return less.offload_optimizer <= saver.offload_optimizer &&
             less.offload_activations <= saver.offload_activations &&
             (less.recompute == Recompute::none ||
              (less.recompute == saver.recompute && !partial(saver.recompute)));
    });
  }

  static bool is_plain(const Strategy& strategy) {
    return strategy.recompute == Recompute::none &&
           !strategy.offload_optimizer && !strategy.offload_activations;
  }

  bool partial(Recompute recompute) const {
    return recompute == Recompute::all ||
           (recompute == Recompute::selective && partial_selective_);
  }

  // Whether it fits. Enters the fastest of it.
  bool try_saver(Strategy strategy) {
    const auto whole = estimate(strategy);
    if (!whole) return false;
    if (is_plain(strategy)) {
      too_slow_ = whole->step.step_seconds >= limit_;
      plain_ = whole;
    }
    if (!whole->step.fits) {
      keep_closest(*whole);
      return false;
    }
    if (strategy.recompute != Recompute::none) {
      enter_fewest_layers(strategy, *whole);
    } else {
      enter(*whole);
    }
    return true;
  }

  void enter_fewest_layers(Strategy strategy, const Candidate& whole) {
    enter(whole);
    if (!partial(strategy.recompute)) return;
    const int64_t most = layers_of_stage(strategy);
    int64_t low = 0;  // does not fit
    int64_t high = most;
    int64_t guess = most / 2;
    if (plain_ && same_host(plain_->strategy, strategy)) {
      // Bytes and seconds grow with the layers, nearly in proportion.
      guess = guess_layers(*plain_, whole, most);
      if (seconds_of(*plain_, whole, guess - 1, most) >= limit_) return;
    }
    std::optional<Candidate> fewest;
    while (high - low > 1) {
      strategy.recompute_layers = std::clamp(guess, low + 1, high - 1);
      const auto candidate = estimate(strategy);
      const bool fits = candidate && candidate->step.fits;
      (fits ? high : low) = strategy.recompute_layers;
      if (fits) fewest = candidate;
      // The neighbour decides when the guess is right.
      const bool first = guess == strategy.recompute_layers;
      guess = first ? guess + (fits ? -1 : 1) : (low + high) / 2;
    }
    if (fewest) enter(*fewest);
    if (!job_.constraints.says("recompute_layers")) return;
    for (int64_t layers = 1; layers < layers_of_stage(strategy); ++layers) {
      if (!job_.constraints.allow("recompute_layers", layers)) continue;
      strategy.recompute_layers = layers;
      const auto candidate = estimate(strategy);
      if (candidate && candidate->step.fits) enter(*candidate);
    }
  }

  static bool same_host(const Strategy& one, const Strategy& other) {
    return one.offload_optimizer == other.offload_optimizer &&
           one.offload_activations == other.offload_activations;
  }

  int64_t guess_layers(
      const Candidate& none, const Candidate& all, int64_t most) const {
    const double without = none.step.memory.peak_bytes();
    const double saved = without - all.step.memory.peak_bytes();
    if (saved <= 0) return most;
    const double share = (without - usable_bytes_) / saved;
    return std::clamp<int64_t>(
        static_cast<int64_t>(std::ceil(share * static_cast<double>(most))), 1,
        most);
  }

  static double seconds_of(
      const Candidate& none, const Candidate& all, int64_t layers, int64_t most) {
    return none.step.step_seconds +
           (all.step.step_seconds - none.step.step_seconds) *
               static_cast<double>(layers) / static_cast<double>(most);
  }

  int64_t layers_of_stage(const Strategy& strategy) const {
    const int64_t stages =
        strategy.layout.pp * std::max<int64_t>(1, strategy.stages_per_rank);
    const int64_t blocks = num_layers(job_.model);
    return (blocks + stages - 1) / stages;
  }

  std::optional<Candidate> estimate(const Strategy& strategy) {
    if (!check_strategy(job_.model, strategy, job_.cluster).empty()) return {};
    ++estimated_;
    Candidate candidate{
        strategy, estimate_step(job_.model, strategy, job_.cluster)};
    if (candidate.step.memory.host_bytes > host_bytes_) {
      candidate.step.fits = false;
    }
    return candidate;
  }

  void enter(const Candidate& candidate) {
    if (candidate.step.step_seconds >= limit_) return;
    if (!job_.constraints.allow(candidate.strategy)) return;
    if (!best_ || faster(candidate, *best_)) best_ = candidate;
  }

  void keep_closest(const Candidate& candidate) {
    const double bytes = candidate.step.memory.peak_bytes();
    if (!closest_ || bytes < closest_->step.memory.peak_bytes()) {
      closest_ = candidate;
    }
  }

  const SearchJob& job_;
  std::vector<Saver> savers_;
  bool partial_selective_;
  double host_bytes_;  // for each rank
  double usable_bytes_;
  std::vector<Saver> fitted_;
  std::optional<Candidate> best_;
  std::optional<Candidate> closest_;
  std::optional<Candidate> plain_;
  double limit_ = kForever;
  bool too_slow_ = false;
  int64_t estimated_ = 0;
};

// Seconds of a microbatch through all layers on one stage, for lower bounds.
class MicrobatchTimes {
 public:
  explicit MicrobatchTimes(const SearchJob& job) : job_(job) {
    for (const auto& group : job.cluster.groups) {
      Cluster equal = job.cluster;
      equal.groups = {group};
      equal.groups[0].count =
          (job.devices + group.node.num_devices - 1) / group.node.num_devices;
      equals_.push_back(equal);
    }
  }

  double of(const Strategy& group) {
    const auto& layout = group.layout;
    const Key key = {layout.tp, layout.cp, layout.ep, group.sequence_parallel,
                     group.microbatch_size};
    const auto [at, is_new] = times_.try_emplace(key, 0.0);
    if (is_new) at->second = compute(group);
    return at->second;
  }

 private:
  using Key = std::tuple<int64_t, int64_t, int64_t, bool, int64_t>;

  // On the fastest devices, with nothing but the work of the microbatch.
  double compute(const Strategy& group) const {
    Strategy alone = group;
    alone.order = kAxes;
    alone.layout.dp_replicate = group.layout.data_degree() * group.layout.pp;
    alone.layout.dp_shard = 1;
    alone.layout.pp = 1;
    alone.zero_stage = 0;
    alone.stages_per_rank = 0;
    alone.schedule = "1f1b";
    alone.global_batch = alone.data_ranks() * alone.microbatch_size;
    double least = kForever;
    for (const auto& cluster : equals_) {
      const auto times = stage_times(job_.model, alone, cluster);
      double seconds = 0;
      for (const auto& stage : times.stages) {
        seconds += stage.forward + stage.backward;
      }
      least = std::min(least, seconds);
    }
    return least;
  }

  const SearchJob& job_;
  std::vector<Cluster> equals_;
  std::map<Key, double> times_;
};

// The pipeline's part of a step, which strategies share that differ in what the
// data-parallel ranks do alone: learned from the first of them.
class PipelineTimes {
 public:
  double at_least(const Strategy& strategy) const {
    const auto at = seconds_.find(key_of(strategy));
    return at == seconds_.end() ? 0 : at->second;
  }

  void learn(const Candidate& plain) {
    const StepEstimate& step = plain.step;
    const auto exposed = [&](Axis axis) {
      return step.parts.exposed[static_cast<size_t>(axis)];
    };
    seconds_.emplace(
        key_of(plain.strategy),
        step.step_seconds - exposed(Axis::dp_replicate) -
            exposed(Axis::dp_shard) - step.parts.optimizer - step.parts.other);
  }

 private:
  using Key = std::tuple<
      Layout, bool, int64_t, std::array<Axis, 6>, std::string, int64_t>;

  static Key key_of(const Strategy& strategy) {
    Layout layout = strategy.layout;
    layout.dp_replicate = layout.data_degree();
    layout.dp_shard = 1;
    return {layout, strategy.sequence_parallel, strategy.microbatch_size,
            strategy.order, strategy.schedule, strategy.stages_per_rank};
  }

  struct Less {
    bool operator()(const Key& a, const Key& b) const {
      const auto degrees = [](const Layout& layout) {
        return std::array{layout.dp_replicate, layout.tp, layout.pp, layout.cp,
                          layout.ep};
      };
      const auto rest = [](const Key& key) {
        return std::tie(std::get<1>(key), std::get<2>(key), std::get<3>(key),
                        std::get<4>(key), std::get<5>(key));
      };
      const auto one = degrees(std::get<0>(a));
      const auto other = degrees(std::get<0>(b));
      return one != other ? one < other : rest(a) < rest(b);
    }
  };
  std::map<Key, double, Less> seconds_;
};

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

}  // namespace

double lower_bound_seconds(const Strategy& strategy, double microbatch_seconds) {
  const double pp = static_cast<double>(strategy.layout.pp);
  const double waits =
      strategy.layout.pp == 1
          ? 0
          : kEvenStages * (pp - 1) *
                bubble_share(strategy.schedule, strategy.stages_per_rank);
  const double microbatches = static_cast<double>(strategy.num_microbatches());
  return (microbatches + waits) * microbatch_seconds / pp;
}

namespace {

SearchResult search(const SearchJob& job, int64_t keep, bool offload) {
  SearchResult result;
  Ranking ranking(keep);
  Fitter fitter(job, offload);
  PipelineTimes pipelines;
  const double usable = most_usable_bytes(job.cluster);
  std::optional<Strategy> smallest;
  double smallest_bytes = kForever;
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
    if (smallest) fitter.fit(*smallest, kForever);
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
