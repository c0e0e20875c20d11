#include "echelon/planner/memory_fitter.h"

#include <algorithm>
#include <cmath>

#include "echelon/planner/axis_orders.h"

namespace echelon {
namespace {

constexpr double kHostShare = 0.8;  // of the host's memory, for offloading

// The host memory that each device may use, unlimited where it is not known.
double least_host_bytes(const Cluster& cluster) {
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

bool is_plain(const Strategy& strategy) {
  return strategy.recompute == Recompute::none && !strategy.offload_optimizer &&
         !strategy.offload_activations;
}

template <class Saves>  // a strategy or a saver
bool same_host(const Saves& one, const Saves& other) {
  return one.offload_optimizer == other.offload_optimizer &&
         one.offload_activations == other.offload_activations;
}

}  // namespace

double most_usable_bytes(const Cluster& cluster) {
  double most = 0;
  for (const auto& group : cluster.groups) {
    most = std::max(most, usable_bytes(group.node.device));
  }
  return most;
}

MemoryFitter::MemoryFitter(const SearchJob& job, bool offload)
    : job_(job),
      savers_(list_savers(job, offload)),
      partial_selective_(rules_of_framework(job.stack).partial_selective),
      host_bytes_(least_host_bytes(job.cluster)),
      usable_bytes_(most_usable_bytes(job.cluster)) {}

std::vector<MemoryFitter::Saver>
MemoryFitter::list_savers(const SearchJob& job, bool offload) {
  std::vector<Saver> savers;
  for (int64_t optimizer = 0; optimizer <= 1; ++optimizer) {
    for (int64_t activations = 0; activations <= 1; ++activations) {
      if (!offload && optimizer + activations > 0) continue;
      if (!job.constraints.allow("offload", optimizer)) continue;
      if (!job.constraints.allow("activations", activations)) continue;
      for (const Recompute recompute : kRecomputes) {
        const bool none = recompute == Recompute::none;
        if (none && !job.constraints.allow("recompute_layers", -1)) continue;
        // Activations on the host need no recompute.
        if (activations == 1 && recompute == Recompute::selective) continue;
        if (!job.constraints.allow(
                "recompute", static_cast<int64_t>(recompute))) {
          continue;
        }
        savers.push_back({optimizer == 1, activations == 1, recompute});
      }
    }
  }
  return savers;
}

// Weighs before it times, since most strategies do not fit.
std::optional<Candidate> MemoryFitter::fit(
    const Strategy& strategy, const PipelineBound& bound,
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

// The ways that fit and may be below the limit, without those that do more than
// another.
std::vector<MemoryFitter::Way>
MemoryFitter::list_ways(const Strategy& strategy) {
  std::vector<Saver> fitted;
  std::vector<Way> ways;
  for (auto begin = savers_.begin(); begin != savers_.end();) {
    const auto end = std::find_if(begin, savers_.end(), [&](const Saver& one) {
      return !same_host(one, *begin);
    });
    // The last saver with the same offload takes the least memory.
    const Saver& last = *(end - 1);
    const auto least =
        is_needless(last, fitted) ? std::nullopt : weigh_with(last, strategy);
    if (least && !least->fits && !closer(*least)) {
      begin = end;
      continue;
    }
    for (; begin != end; ++begin) {
      if (is_needless(*begin, fitted)) continue;
      const auto weighed =
          least && begin + 1 == end ? least : weigh_with(*begin, strategy);
      if (!weighed) continue;
      if (is_plain(weighed->strategy)) unsaved_ = weighed;
      if (!weighed->fits) {
        if (closer(*weighed)) closest_ = weighed;
        continue;
      }
      fitted.push_back(*begin);
      Way way{*weighed, {}};
      if (partial(begin->recompute)) way.fewest = with_fewest_layers(*weighed);
      const Weighed& shortest = way.fewest ? *way.fewest : way.whole;
      if (bound_->of(shortest.strategy) < limit_) ways.push_back(way);
    }
  }
  return ways;
}

// Whether a saver that does less fits.
bool MemoryFitter::is_needless(
    const Saver& saver, const std::vector<Saver>& fitted) const {
  return std::ranges::any_of(fitted, [&](const Saver& less) {
    return less.offload_optimizer <= saver.offload_optimizer &&
           less.offload_activations <= saver.offload_activations &&
           (less.recompute == Recompute::none ||
            (less.recompute == saver.recompute && !partial(saver.recompute)));
  });
}

// Whether it is too slow even without savings of memory, which only add time.
bool MemoryFitter::too_slow(const Strategy& strategy) {
  const bool asked = std::ranges::any_of(savers_, [](const Saver& one) {
    return one.recompute == Recompute::none && !one.offload_optimizer &&
           !one.offload_activations;
  });
  if (!asked) return false;
  if (!unsaved_) unsaved_ = weigh(strategy);
  plain_ = time(*unsaved_);
  return least_seconds(*plain_) >= limit_;
}

bool MemoryFitter::partial(Recompute recompute) const {
  return recompute == Recompute::all ||
         (recompute == Recompute::selective && partial_selective_);
}

void MemoryFitter::enter(const Way& way) {
  const Strategy& strategy = way.whole.strategy;
  const Candidate whole =
      is_plain(strategy) && plain_ ? *plain_ : time(way.whole);
  if (way.fewest) enter(whole);
  enter_in_orders(way.fewest ? time(*way.fewest) : whole);
  if (partial(strategy.recompute) &&
      job_.constraints.says("recompute_layers")) {
    enter_asked_layers(strategy);
  }
}

// Searches the fewest layers to recompute, given that all suffice; empty when
// no fewer do.
std::optional<MemoryFitter::Weighed>
MemoryFitter::with_fewest_layers(const Weighed& all) const {
  Strategy strategy = all.strategy;
  const int64_t most = layers_of_stage(strategy);
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

void MemoryFitter::enter_asked_layers(Strategy strategy) {
  for (int64_t layers = 1; layers < layers_of_stage(strategy); ++layers) {
    if (!job_.constraints.allow("recompute_layers", layers)) continue;
    strategy.recompute_layers = layers;
    const auto weighed = weigh(strategy);
    if (weighed && weighed->fits) enter_in_orders(time(*weighed));
  }
}

int64_t MemoryFitter::guess_layers(
    const Weighed& none, const Weighed& all, int64_t most) const {
  // Bytes grow nearly in proportion to the layers.
  const double without = none.memory.peak_bytes();
  const double saved = without - all.memory.peak_bytes();
  if (saved <= 0) return most;
  const double share = (without - usable_bytes_) / saved;
  return std::clamp<int64_t>(
      static_cast<int64_t>(std::ceil(share * static_cast<double>(most))), 1,
      most);
}

int64_t MemoryFitter::layers_of_stage(const Strategy& strategy) const {
  if (!strategy.stage_layers.empty()) {
    return *std::ranges::max_element(strategy.stage_layers);
  }
  const int64_t stages =
      strategy.layout.pp * std::max<int64_t>(1, strategy.stages_per_rank);
  const int64_t blocks = num_layers(job_.model);
  return (blocks + stages - 1) / stages;
}

std::optional<MemoryFitter::Weighed>
MemoryFitter::weigh_with(const Saver& saver, Strategy strategy) const {
  strategy.offload_optimizer = saver.offload_optimizer;
  strategy.offload_activations = saver.offload_activations;
  strategy.recompute = saver.recompute;
  return weigh(strategy);
}

std::optional<MemoryFitter::Weighed>
MemoryFitter::weigh(const Strategy& strategy) const {
  if (!check_strategy(job_.model, strategy, job_.cluster).empty()) return {};
  Weighed weighed{
      strategy,
      fullest_memory(job_.model, strategy, job_.cluster, bound_->places())};
  weighed.fits = weighed.memory.fullness() <= 1 &&
                 weighed.memory.host_bytes <= host_bytes_;
  return weighed;
}

Candidate MemoryFitter::time(const Weighed& weighed) {
  ++estimated_;
  Candidate candidate{
      weighed.strategy,
      estimate_time(
          job_.model, weighed.strategy, job_.cluster, bound_->places())};
  candidate.step.memory = weighed.memory;
  candidate.step.fits = weighed.fits;
  return candidate;
}

std::optional<Candidate> MemoryFitter::closest() const {
  if (!closest_) return {};
  Candidate candidate{
      closest_->strategy,
      estimate_step(job_.model, closest_->strategy, job_.cluster)};
  candidate.step.fits = false;
  return candidate;
}

void MemoryFitter::enter(const Candidate& candidate) {
  if (candidate.step.step_seconds >= limit_) return;
  if (!job_.constraints.allow(candidate.strategy)) return;
  if (!best_ || is_faster(candidate, *best_)) best_ = candidate;
}

// Enters a candidate that fits, in every order.
void MemoryFitter::enter_in_orders(const Candidate& candidate) {
  enter(candidate);
  for (const AxisOrder& order : other_orders_) {
    const double limit = best_ ? best_->step.step_seconds : limit_;
    if (least_seconds(candidate) >= limit) return;
    Candidate other = candidate;
    other.strategy.layout.order = order;
    other.step = estimate_time(job_.model, other.strategy, job_.cluster);
    other.step.memory = candidate.step.memory;
    other.step.fits = candidate.step.fits;
    ++estimated_;
    enter(other);
  }
}

// The least time in any order. Pipelines are fastest in the first order, so
// that the others can only gain the exposed communication of data parallelism.
double MemoryFitter::least_seconds(const Candidate& candidate) const {
  const StepEstimate& step = candidate.step;
  if (other_orders_.empty()) return step.step_seconds;
  const auto exposed = [&](Axis axis) {
    return step.parts.exposed[static_cast<size_t>(axis)];
  };
  return step.step_seconds - exposed(Axis::dp_replicate) -
         exposed(Axis::dp_shard);
}

// Whether it needs less memory than all before it that do not fit.
bool MemoryFitter::closer(const Weighed& weighed) const {
  return !closest_ ||
         weighed.memory.peak_bytes() < closest_->memory.peak_bytes();
}

}  // namespace echelon
