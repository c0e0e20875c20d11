// A knapsack: layer by layer, the sums of kept bytes and repeated FLOPs that no
// other sum beats in both, by ascending bytes and so by descending FLOPs.
#include "echelon/cost/choose_recompute.h"

#include <algorithm>
#include <optional>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::cost {
namespace {

struct State {
  int64_t bytes = 0;
  double flops = 0;
  // The state of the layer before that this one extends, and the choice that
  // was made here.
  size_t before = 0;
  Recompute choice = Recompute::none;
};

using States = std::vector<State>;

// By layer, the bytes that it and the later ones keep when each keeps the
// least. No choice can save more.
std::vector<int64_t> least_after(const std::vector<RecomputeCost>& layers) {
  std::vector<int64_t> least(layers.size() + 1, 0);
  for (size_t i = layers.size(); i-- > 0;) {
    const auto& kept = layers[i].kept_bytes;
    least[i] = least[i + 1] + *std::min_element(kept.begin(), kept.end());
  }
  return least;
}

bool comes_first(const State& a, const State& b) {
  if (a.bytes != b.bytes) return a.bytes < b.bytes;
  if (a.flops != b.flops) return a.flops < b.flops;
  return a.choice > b.choice;
}

// Keeps the states with fewer FLOPs than all states that need no more bytes.
// `states` are sorted by bytes.
States undominated(const States& states) {
  States kept;
  for (const auto& state : states) {
    if (kept.empty() || state.flops < kept.back().flops) kept.push_back(state);
  }
  return kept;
}

// Keeps one state for each range of bytes: the one with the fewest FLOPs, which
// is the last of the range.
States thinned(const States& states, int64_t range) {
  States kept;
  for (size_t i = 0; i < states.size(); ++i) {
    if (i + 1 == states.size() || i == 0 ||
        states[i].bytes / range != states[i + 1].bytes / range) {
      kept.push_back(states[i]);
    }
  }
  return kept;
}

States
extended(const States& states, const RecomputeCost& layer, int64_t at_most) {
  States next;
  for (size_t i = 0; i < states.size(); ++i) {
    for (const auto choice : kRecomputes) {
      const int64_t bytes = states[i].bytes + layer.kept(choice);
      if (bytes > at_most) continue;
      next.push_back({bytes, states[i].flops + layer.again(choice), i, choice});
    }
  }
  std::sort(next.begin(), next.end(), comes_first);
  return undominated(next);
}

RecomputeChoice least_kept(const std::vector<RecomputeCost>& layers) {
  RecomputeChoice result;
  result.fits = false;
  for (const auto& layer : layers) {
    const auto choice = *std::min_element(
        kRecomputes.begin(), kRecomputes.end(), [&](Recompute a, Recompute b) {
          if (layer.kept(a) != layer.kept(b)) {
            return layer.kept(a) < layer.kept(b);
          }
          return layer.again(a) < layer.again(b);
        });
    result.layers.push_back(choice);
    result.kept_bytes += layer.kept(choice);
    result.again_flops += layer.again(choice);
  }
  return result;
}

std::string mebibytes(int64_t bytes) {
  return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB";
}

}  // namespace

std::string to_string(Recompute recompute) {
  constexpr std::array<const char*, 3> names = {"none", "selective", "all"};
  return names[static_cast<size_t>(recompute)];
}

RecomputeChoice choose_recompute(
    const std::vector<RecomputeCost>& layers, int64_t budget_bytes,
    size_t most_states) {
  const auto least = least_after(layers);
  if (least[0] > budget_bytes) return least_kept(layers);
  const int64_t range = std::max<int64_t>(
      1, budget_bytes / static_cast<int64_t>(std::max<size_t>(most_states, 1)));
  std::vector<States> steps = {{State()}};
  for (size_t i = 0; i < layers.size(); ++i) {
    auto next = extended(steps.back(), layers[i], budget_bytes - least[i + 1]);
    if (next.size() > most_states) next = thinned(next, range);
    steps.push_back(std::move(next));
  }
  // Fewest FLOPs are at the end.
  RecomputeChoice result;
  result.layers.resize(layers.size());
  size_t at = steps.back().size() - 1;
  result.kept_bytes = steps.back()[at].bytes;
  result.again_flops = steps.back()[at].flops;
  for (size_t i = layers.size(); i > 0; --i) {
    const auto& state = steps[i][at];
    result.layers[i - 1] = state.choice;
    at = state.before;
  }
  return result;
}

void keep_for_the_next(
    std::vector<RecomputeCost>& costs, const std::vector<int64_t>& repeated) {
  for (size_t i = 0; i + 1 < costs.size(); ++i) {
    for (const auto choice : {Recompute::selective, Recompute::all}) {
      costs[i].kept_bytes[static_cast<size_t>(choice)] += repeated[i + 1];
    }
  }
}

std::optional<Recompute> recompute_of(echelon::Recompute option) {
  switch (option) {
    case echelon::Recompute::none:
      return Recompute::none;
    case echelon::Recompute::selective:
      return Recompute::selective;
    case echelon::Recompute::all:
      return Recompute::all;
    case echelon::Recompute::budget:
      break;
  }
  return std::nullopt;
}

std::vector<Recompute> plan_recompute(
    const MemoryOptions& options, const std::vector<RecomputeCost>& costs,
    int64_t in_flight) {
  if (const auto every = recompute_of(options.recompute)) {
    return std::vector<Recompute>(costs.size(), *every);
  }
  const auto choice = choose_recompute(
      costs, options.activation_bytes / std::max<int64_t>(1, in_flight));
  if (choice.fits) return choice.layers;
  throw ConfigError(format(
      "[memory] activation_bytes={} ({}) for {} microbatches that wait for "
      "their backward, but when every layer is computed again their inputs "
      "alone are {}; give at least that, make microbatches smaller, or keep "
      "them elsewhere (memory.activations = \"offload\")",
      options.activation_bytes, mebibytes(options.activation_bytes), in_flight,
      mebibytes(choice.kept_bytes * in_flight)));
}

}  // namespace echelon::cost
