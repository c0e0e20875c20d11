// Branch and bound in two levels. The groups of list_groups are taken by
// ascending bound (PipelineBound), and so are the variants within a group. A
// group or variant is skipped when its lower bound is not below the time of its
// layout's best candidate, or of the slowest of the layouts kept; a variant
// also when its weights, gradients and optimizer state alone exceed every
// device. All of these are lower bounds, so that no skipped strategy is faster
// than those kept. What remains goes to MemoryFitter, which estimates memory
// first and times only what fits. When nothing fits and the framework can
// offload, the search runs again with the host's memory.
#include "echelon/planner/search.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <utility>
#include <vector>

#include "echelon/planner/axis_orders.h"
#include "echelon/planner/pipeline_bound.h"
#include "echelon/simulator/simulate.h"

namespace echelon::planner {
namespace {

constexpr double kHostShare = 0.8;  // of the host's memory, for offloading
// Where nothing fits: strategies whose state is up to this much larger than the
// smallest may need less in all.
constexpr double kNearSmallest = 1.1;
constexpr size_t kMostNear = 1000;

// The host memory that each device may use, unlimited where it is not known.
double least_host_bytes(const cluster::Cluster& cluster) {
  double least = std::numeric_limits<double>::infinity();
  for (const auto& group : cluster.groups) {
    if (group.node.host_memory_bytes <= 0) continue;
    least = std::min(
        least, kHostShare * group.node.host_memory_bytes /
                   static_cast<double>(group.node.num_devices));
  }
  return least;
}

// The orders that the search leaves to MemoryFitter: on equal nodes, where
// memory does not depend on the order, all but the first.
std::vector<AxisOrder>
other_orders(const SearchJob& job, const Layout& layout) {
  if (job.cluster.mixed()) return {};
  std::vector<AxisOrder> others;
  const auto orders = orders_of(job, layout);
  for (size_t i = 1; i < orders.size(); ++i) {
    others.push_back(axis_orders()[static_cast<size_t>(orders[i])]);
  }
  return others;
}

template <class Saves>  // a strategy or a saver
bool saves_nothing(const Saves& one) {
  return one.recompute == cost::Recompute::none && !one.offload_optimizer &&
         !one.offload_activations;
}

template <class Saves>
bool same_host(const Saves& one, const Saves& other) {
  return one.offload_optimizer == other.offload_optimizer &&
         one.offload_activations == other.offload_activations;
}

// The bytes that a job may use of the largest device.
double most_usable_bytes(const cluster::Cluster& cluster) {
  double most = 0;
  for (const auto& group : cluster.groups) {
    most = std::max(most, cost::usable_bytes(group.node.device));
  }
  return most;
}

// The least time of a step with everything else as it is, whatever the data-
// parallel ranks hide. Simulated steps take no less: formulas assume that
// nothing waits for a link but these.
double least_seconds(const cost::StepEstimate& step) {
  const auto exposed = [&](Axis axis) {
    return step.parts.exposed[static_cast<size_t>(axis)];
  };
  return step.step_seconds - exposed(Axis::dp_replicate) -
         exposed(Axis::dp_shard);
}

// Finds the fastest way to make one strategy fit: what is recomputed, in as few
// layers as possible, and what is kept in the host's memory. It estimates
// memory before it times, since most strategies do not fit. On equal nodes all
// orders of the axes need the same memory, so a strategy that fits is tried in
// each.
class MemoryFitter {
 public:
  // `offload`: whether the host's memory may be used.
  MemoryFitter(const SearchJob& job, bool offload)
      : job_(job),
        savers_(list_savers(job, offload)),
        asked_layers_(asked_recompute_layers(job)),
        partial_selective_(rules_of_framework(job.framework).partial_selective),
        host_bytes_(least_host_bytes(job.cluster)),
        usable_bytes_(most_usable_bytes(job.cluster)) {}

  // Empty when it does not fit or is not below `limit_seconds`. `bound` is that
  // of the strategy's group.
  std::optional<Candidate>
  fit(const cost::Strategy& strategy, const PipelineBound& bound,
      double limit_seconds) {
    best_.reset();
    plain_.reset();
    unsaved_.reset();
    limit_ = limit_seconds;
    bound_ = &bound;
    other_orders_ = other_orders(job_, strategy.layout);
    const auto ways = list_ways(strategy);
    if (ways.empty() || too_slow(strategy)) return {};
    for (const Way& way : ways) enter(way);
    return best_;
  }

  // All ways and orders whose least_seconds() are below `limit_seconds`.
  std::vector<Candidate> fit_all(
      const cost::Strategy& strategy, const PipelineBound& bound,
      double limit_seconds) {
    std::vector<Candidate> all;
    all_ = &all;
    fit(strategy, bound, limit_seconds);
    all_ = nullptr;
    return all;
  }

  // The last strategy without savings of memory, if it was timed.
  const std::optional<Candidate>& plain() const { return plain_; }
  // The one that needs the least memory of all that did not fit.
  std::optional<Candidate> closest() const {
    if (!closest_) return {};
    Candidate candidate{
        closest_->strategy,
        cost::estimate_step(job_.model, closest_->strategy, job_.cluster)};
    candidate.step.fits = false;
    return candidate;
  }

  // How many steps were timed. Most strategies are found to be too large first.
  int64_t estimated() const { return estimated_; }

 private:
  // A strategy and its memory, before it is timed.
  struct Weighed {
    cost::Strategy strategy;
    cost::MemoryEstimate memory;
    bool fits = false;
  };

  // One way to make it fit.
  struct Way {
    Weighed whole;                  // with recompute in all layers
    std::optional<Weighed> fewest;  // in as few as possible
  };

  // The ways that fit and may be below the limit, without those that do more
  // than another.
  std::vector<Way> list_ways(const cost::Strategy& strategy) {
    std::vector<MemorySaver> fitted;
    std::vector<Way> ways;
    for (auto begin = savers_.begin(); begin != savers_.end();) {
      const auto end = std::find_if(
          begin, savers_.end(),
          [&](const MemorySaver& one) { return !same_host(one, *begin); });
      // The last saver with the same offload takes the least memory.
      const MemorySaver& last = *(end - 1);
      const auto least =
          is_needless(last, fitted) ? std::nullopt : weigh_with(last, strategy);
      // If even that one does not fit, none of these does.
      if (least && !least->fits && !closer(*least)) {
        begin = end;
        continue;
      }
      for (; begin != end; ++begin) {
        if (is_needless(*begin, fitted)) continue;
        const auto weighed =
            least && begin + 1 == end ? least : weigh_with(*begin, strategy);
        if (!weighed) continue;
        if (saves_nothing(weighed->strategy)) unsaved_ = weighed;
        if (!weighed->fits) {
          if (closer(*weighed)) closest_ = weighed;
          continue;
        }
        fitted.push_back(*begin);
        Way way{*weighed, {}};
        if (partial(begin->recompute) && !asked_layers_)
          way.fewest = with_fewest_layers(*weighed);
        const Weighed& shortest = way.fewest ? *way.fewest : way.whole;
        if (bound_->of(shortest.strategy) < limit_) ways.push_back(way);
      }
    }
    return ways;
  }

  // Whether a saver that does less fits.
  bool is_needless(
      const MemorySaver& saver, const std::vector<MemorySaver>& fitted) const {
    return std::ranges::any_of(fitted, [&](const MemorySaver& less) {
      return less.offload_optimizer <= saver.offload_optimizer &&
             less.offload_activations <= saver.offload_activations &&
             (less.recompute == cost::Recompute::none ||
              (less.recompute == saver.recompute && !partial(saver.recompute)));
    });
  }

  // Whether it is too slow even without savings of memory, which only add time.
  bool too_slow(const cost::Strategy& strategy) {
    if (std::ranges::none_of(savers_, saves_nothing<MemorySaver>)) return false;
    if (!unsaved_) unsaved_ = weigh(strategy);
    plain_ = time(*unsaved_);
    return least_of(*plain_) >= limit_;
  }

  bool partial(cost::Recompute recompute) const {
    return recompute == cost::Recompute::all ||
           (recompute == cost::Recompute::selective && partial_selective_);
  }

  void enter(const Way& way) {
    const cost::Strategy& strategy = way.whole.strategy;
    const Candidate whole =
        saves_nothing(strategy) && plain_ ? *plain_ : time(way.whole);
    if (way.fewest) enter(whole);
    enter_in_orders(way.fewest ? time(*way.fewest) : whole);
  }

  // Searches the fewest layers to recompute, given that all suffice; empty when
  // no fewer do.
  std::optional<Weighed> with_fewest_layers(const Weighed& all) const {
    cost::Strategy strategy = all.strategy;
    const int64_t most = layers_of_stage(job_.model, strategy);
    int64_t low = 0;  // does not fit
    int64_t high = most;
    int64_t guess = unsaved_ && same_host(unsaved_->strategy, strategy)
                        ? guess_layers(*unsaved_, all, most)
                        : most / 2;
    std::optional<Weighed> fewest;
    while (high - low > 1) {
      strategy.recompute_layers = std::clamp(guess, low + 1, high - 1);
      const auto weighed = weigh(strategy);
      const bool fits = weighed && weighed->fits;
      (fits ? high : low) = strategy.recompute_layers;
      if (fits) fewest = weighed;
      // If the guess is right, its neighbour proves it.
      const bool first = guess == strategy.recompute_layers;
      guess = first ? guess + (fits ? -1 : 1) : (low + high) / 2;
    }
    return fewest;
  }

  int64_t
  guess_layers(const Weighed& none, const Weighed& all, int64_t most) const {
    // Bytes grow nearly in proportion to the layers.
    const double without = none.memory.peak_bytes();
    const double saved = without - all.memory.peak_bytes();
    if (saved <= 0) return most;
    const double share = (without - usable_bytes_) / saved;
    return std::clamp<int64_t>(
        static_cast<int64_t>(std::ceil(share * static_cast<double>(most))), 1,
        most);
  }

  std::optional<Weighed>
  weigh_with(const MemorySaver& saver, cost::Strategy strategy) const {
    strategy.offload_optimizer = saver.offload_optimizer;
    strategy.offload_activations = saver.offload_activations;
    strategy.recompute = saver.recompute;
    if (asked_layers_ && saver.recompute != cost::Recompute::none) {
      if (*asked_layers_ >= layers_of_stage(job_.model, strategy)) return {};
      strategy.recompute_layers = *asked_layers_;
    }
    return weigh(strategy);
  }

  std::optional<Weighed> weigh(const cost::Strategy& strategy) const {
    if (!cost::check_strategy(job_.model, strategy, job_.cluster).empty())
      return {};
    Weighed weighed{
        strategy, cost::fullest_memory(
                      job_.model, strategy, job_.cluster, bound_->places())};
    weighed.fits = weighed.memory.fullness() <= 1 &&
                   weighed.memory.host_bytes <= host_bytes_;
    return weighed;
  }

  Candidate time(const Weighed& weighed) {
    ++estimated_;
    Candidate candidate{
        weighed.strategy,
        cost::estimate_time(
            job_.model, weighed.strategy, job_.cluster, bound_->places())};
    candidate.step.memory = weighed.memory;
    candidate.step.fits = weighed.fits;
    return candidate;
  }

  void enter(const Candidate& candidate) {
    if (!job_.constraints.allow(candidate.strategy)) return;
    if (all_) {
      if (least_of(candidate) < limit_) all_->push_back(candidate);
      return;
    }
    if (candidate.step.step_seconds >= limit_) return;
    if (!best_ || is_faster(candidate, *best_)) best_ = candidate;
  }

  // Enters a candidate that fits, in every order.
  void enter_in_orders(const Candidate& candidate) {
    enter(candidate);
    for (const AxisOrder& order : other_orders_) {
      const double limit = best_ ? best_->step.step_seconds : limit_;
      if (least_of(candidate) >= limit) return;
      Candidate other = candidate;
      other.strategy.layout.order = order;
      other.step =
          cost::estimate_time(job_.model, other.strategy, job_.cluster);
      other.step.memory = candidate.step.memory;
      other.step.fits = candidate.step.fits;
      ++estimated_;
      enter(other);
    }
  }

  // The least time in any order. Pipelines are fastest in the first order, so
  // that the others can only gain the exposed communication of data
  // parallelism.
  double least_of(const Candidate& candidate) const {
    return all_ || !other_orders_.empty() ? least_seconds(candidate.step)
                                          : candidate.step.step_seconds;
  }

  // Whether it needs less memory than all before it that do not fit.
  bool closer(const Weighed& weighed) const {
    return !closest_ ||
           weighed.memory.peak_bytes() < closest_->memory.peak_bytes();
  }

  const SearchJob& job_;
  const PipelineBound* bound_ = nullptr;  // while one strategy is fitted
  std::vector<MemorySaver> savers_;
  std::optional<int64_t> asked_layers_;  // by the constraints
  bool partial_selective_;
  double host_bytes_;  // for each rank
  double usable_bytes_;
  std::vector<AxisOrder> other_orders_;  // that may be faster
  std::optional<Candidate> best_;
  std::vector<Candidate>* all_ = nullptr;  // while fit_all() runs
  std::optional<Weighed> closest_;
  std::optional<Weighed> unsaved_;  // the strategy without savings
  std::optional<Candidate> plain_;
  double limit_ = std::numeric_limits<double>::infinity();
  int64_t estimated_ = 0;
};

struct BoundedGroup {
  cost::Strategy strategy;
  PipelineBound bound;
};

std::vector<BoundedGroup>
bounded_groups(const SearchJob& job, LayerTimes& times) {
  std::vector<BoundedGroup> groups;
  for (const cost::Strategy& group : list_groups(job)) {
    groups.push_back({group, PipelineBound(job, times, group)});
  }
  std::ranges::stable_sort(groups, [](const auto& a, const auto& b) {
    return a.bound.any_partition() < b.bound.any_partition();
  });
  return groups;
}

struct BoundedVariant {
  cost::Strategy strategy;
  double bound = 0;
};

bool same_pipeline(const cost::Strategy& one, const cost::Strategy& other) {
  return one.schedule == other.schedule &&
         one.stages_per_rank == other.stages_per_rank &&
         one.stage_layers == other.stage_layers;
}

std::vector<BoundedVariant> bounded_variants(
    const PipelineBound& bound, std::vector<cost::Strategy> strategies) {
  std::vector<BoundedVariant> variants;
  for (cost::Strategy& strategy : strategies) {
    // The bound sees a variant's pipeline alone, and variants of one pipeline
    // follow each other.
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
double least_state_bytes(
    const SearchJob& job, const cost::Strategy& variant, bool offload) {
  if (!offload || !job.constraints.allow("offload", 1)) {
    return cost::least_bytes(job.model, variant);
  }
  cost::Strategy offloaded = variant;
  offloaded.offload_optimizer = true;
  return cost::least_bytes(job.model, offloaded);
}

class Search {
 public:
  Search(const SearchJob& job, bool offload)
      : job_(job),
        offload_(offload),
        usable_bytes_(most_usable_bytes(job.cluster)),
        fitter_(job, offload),
        times_(job),
        lists_(job),
        groups_(bounded_groups(job, times_)) {}

  SearchResult run(int64_t keep) {
    by_formulas(keep);
    if (job_.simulate && !result_.best.empty()) by_simulation(keep);
    if (result_.best.empty()) find_closest();
    result_.estimated = fitter_.estimated();
    return result_;
  }

 private:
  void by_formulas(int64_t keep) {
    Ranking ranking(keep);
    for (const auto& group : groups_) {
      const auto number =
          static_cast<int64_t>(lists_.like(group.strategy).size());
      result_.considered += number;
      if (group.bound.any_partition() >=
          ranking.limit_seconds(group.strategy.layout)) {
        result_.pruned_time += number;
        continue;
      }
      for (const auto& variant :
           bounded_variants(group.bound, lists_.of(group.strategy))) {
        const double limit = ranking.limit_seconds(variant.strategy.layout);
        if (is_slow(variant, limit)) {
          ++result_.pruned_time;
        } else if (is_large(variant.strategy)) {
          ++result_.pruned_memory;
        } else {
          const auto fitted = fitter_.fit(variant.strategy, group.bound, limit);
          if (fitted) ranking.enter(*fitted);
          if (fitter_.plain()) pipelines_.learn(*fitter_.plain());
        }
      }
    }
    result_.best = ranking.sorted();
  }

  // Formulas know nothing of collectives that share links, so that the fastest
  // step may be one that they rank far below. Every strategy whose least time
  // is below the fastest simulated step is simulated.
  void by_simulation(int64_t keep) {
    Ranking ranking(keep);
    for (const Candidate& candidate : result_.best) {
      ranking.enter(simulated(candidate));
    }
    double fastest = ranking.sorted().front().step.step_seconds;
    for (const Candidate& candidate : all_below(fastest)) {
      if (least_seconds(candidate.step) >= fastest) continue;
      const Candidate exact = simulated(candidate);
      fastest = std::min(fastest, exact.step.step_seconds);
      ranking.enter(exact);
    }
    result_.best = ranking.sorted();
  }

  bool is_slow(const BoundedVariant& variant, double limit) const {
    return std::max(variant.bound, pipelines_.at_least(variant.strategy)) >=
           limit;
  }

  bool is_large(const cost::Strategy& strategy) {
    const double bytes = least_state_bytes(job_, strategy, offload_);
    if (bytes <= usable_bytes_) return false;
    if (bytes > kNearSmallest * smallest_bytes_) return true;
    if (!cost::check_strategy(job_.model, strategy, job_.cluster).empty())
      return true;
    smallest_bytes_ = std::min(smallest_bytes_, bytes);
    // The list is thinned only when it is full: smallest_bytes_ has fallen
    // since.
    if (near_.size() >= kMostNear) {
      std::erase_if(near_, [&](const auto& one) {
        return one.first > kNearSmallest * smallest_bytes_;
      });
    }
    if (near_.size() < kMostNear) near_.emplace_back(bytes, strategy);
    return true;
  }

  // Sorted by the time that formulas give.
  std::vector<Candidate> all_below(double seconds) {
    std::vector<Candidate> all;
    for (const auto& group : groups_) {
      if (group.bound.any_partition() >= seconds) continue;
      for (const auto& variant :
           bounded_variants(group.bound, lists_.of(group.strategy))) {
        if (is_slow(variant, seconds) || is_large(variant.strategy)) continue;
        std::ranges::move(
            fitter_.fit_all(variant.strategy, group.bound, seconds),
            std::back_inserter(all));
      }
    }
    std::ranges::stable_sort(all, is_faster);
    return all;
  }

  Candidate simulated(Candidate candidate) {
    ++result_.simulated;
    simulate_step(job_, candidate);
    return candidate;
  }

  void find_closest() {
    for (const auto& [bytes, strategy] : near_) {
      if (bytes > kNearSmallest * smallest_bytes_) continue;
      fitter_.fit(
          strategy, PipelineBound(job_, times_, strategy),
          std::numeric_limits<double>::infinity());
    }
    result_.closest = fitter_.closest();
  }

  const SearchJob& job_;
  bool offload_;
  double usable_bytes_;
  MemoryFitter fitter_;
  PipelineTimes pipelines_;
  LayerTimes times_;
  VariantLists lists_;
  std::vector<BoundedGroup> groups_;
  // Strategies that are too large, with the bytes of their state.
  std::vector<std::pair<double, cost::Strategy>> near_;
  double smallest_bytes_ = std::numeric_limits<double>::infinity();
  SearchResult result_;
};

}  // namespace

void simulate_step(const SearchJob& job, Candidate& candidate) {
  cost::StepEstimate step =
      simulator::simulate(
          job.model, candidate.strategy, job.cluster, {.timeline_ranks = 0})
          .step;
  step.memory = candidate.step.memory;
  step.fits = candidate.step.fits;
  candidate.step = step;
}

SearchResult search(const SearchJob& job, int64_t keep) {
  const bool may = rules_of_framework(job.framework).offload;
  const bool asked =
      job.constraints.says("offload") || job.constraints.says("activations");
  SearchResult result = Search(job, may && asked).run(keep);
  if (!result.best.empty() || !may || asked || result.considered == 0) {
    return result;
  }
  SearchResult offloaded = Search(job, true).run(keep);
  offloaded.estimated += result.estimated;
  return offloaded;
}

}  // namespace echelon::planner
