#include "echelon/planner/memory_fitter.h"

#include <algorithm>
#include <cmath>

namespace echelon {
namespace {

constexpr double kHostShare = 0.8;  // of the host's memory, for offloading

// Of the host's memory, what each device may use; where it is not known, anything.
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

bool is_plain(const Strategy& strategy) {
  return strategy.recompute == Recompute::none &&
         !strategy.offload_optimizer && !strategy.offload_activations;
}

bool same_host(const Strategy& one, const Strategy& other) {
  return one.offload_optimizer == other.offload_optimizer &&
         one.offload_activations == other.offload_activations;
}

// Bytes and seconds grow with the layers, nearly in proportion.
double seconds_of(
    const Candidate& none, const Candidate& all, int64_t layers, int64_t most) {
  return none.step.step_seconds +
         (all.step.step_seconds - none.step.step_seconds) *
             static_cast<double>(layers) / static_cast<double>(most);
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
      partial_selective_(rules_of_stack(job.stack).partial_selective),
      host_bytes_(least_host_bytes(job.cluster)),
      usable_bytes_(most_usable_bytes(job.cluster)) {}

std::vector<MemoryFitter::Saver> MemoryFitter::list_savers(
    const SearchJob& job, bool offload) {
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

std::optional<Candidate> MemoryFitter::fit(
    const Strategy& strategy, double limit_seconds) {
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

// Whether something fits that does less.
bool MemoryFitter::needless(const Saver& saver) const {
  return std::any_of(fitted_.begin(), fitted_.end(), [&](const Saver& less) {
    return less.offload_optimizer <= saver.offload_optimizer &&
           less.offload_activations <= saver.offload_activations &&
           (less.recompute == Recompute::none ||
            (less.recompute == saver.recompute && !partial(saver.recompute)));
  });
}

bool MemoryFitter::partial(Recompute recompute) const {
  return recompute == Recompute::all ||
         (recompute == Recompute::selective && partial_selective_);
}

// Whether it fits. Enters the fastest of it.
bool MemoryFitter::try_saver(const Strategy& strategy) {
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

void MemoryFitter::enter_fewest_layers(
    Strategy strategy, const Candidate& whole) {
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
  if (job_.constraints.says("recompute_layers")) enter_asked_layers(strategy);
}

void MemoryFitter::enter_asked_layers(Strategy strategy) {
  for (int64_t layers = 1; layers < layers_of_stage(strategy); ++layers) {
    if (!job_.constraints.allow("recompute_layers", layers)) continue;
    strategy.recompute_layers = layers;
    const auto candidate = estimate(strategy);
    if (candidate && candidate->step.fits) enter(*candidate);
  }
}

int64_t MemoryFitter::guess_layers(
    const Candidate& none, const Candidate& all, int64_t most) const {
  const double without = none.step.memory.peak_bytes();
  const double saved = without - all.step.memory.peak_bytes();
  if (saved <= 0) return most;
  const double share = (without - usable_bytes_) / saved;
  return std::clamp<int64_t>(
      static_cast<int64_t>(std::ceil(share * static_cast<double>(most))), 1,
      most);
}

int64_t MemoryFitter::layers_of_stage(const Strategy& strategy) const {
  if (!strategy.stage_layers.empty()) {
    return *std::max_element(
        strategy.stage_layers.begin(), strategy.stage_layers.end());
  }
  const int64_t stages =
      strategy.layout.pp * std::max<int64_t>(1, strategy.stages_per_rank);
  const int64_t blocks = num_layers(job_.model);
  return (blocks + stages - 1) / stages;
}

std::optional<Candidate> MemoryFitter::estimate(const Strategy& strategy) {
  if (!check_strategy(job_.model, strategy, job_.cluster).empty()) return {};
  ++estimated_;
  Candidate candidate{
      strategy, estimate_step(job_.model, strategy, job_.cluster)};
  if (candidate.step.memory.host_bytes > host_bytes_) {
    candidate.step.fits = false;
  }
  return candidate;
}

void MemoryFitter::enter(const Candidate& candidate) {
  if (candidate.step.step_seconds >= limit_) return;
  if (!job_.constraints.allow(candidate.strategy)) return;
  if (!best_ || faster(candidate, *best_)) best_ = candidate;
}

void MemoryFitter::keep_closest(const Candidate& candidate) {
  const double bytes = candidate.step.memory.peak_bytes();
  if (!closest_ || bytes < closest_->step.memory.peak_bytes()) {
    closest_ = candidate;
  }
}

}  // namespace echelon
