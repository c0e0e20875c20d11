// Which layers to compute again in backward, so that what is kept fits a budget
// and as little as possible is computed twice. Free of LibTorch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "echelon/options/memory.h"

namespace echelon {

/// What backward computes again of a layer: nothing; all but its matrix
/// products and attention; all of it.
enum class Recompute { none, selective, all };

inline constexpr std::array<Recompute, 3> kRecomputes = {
    Recompute::none, Recompute::selective, Recompute::all};

/// "none", "selective", "all": as memory.recompute has them.
std::string to_string(Recompute recompute);

/// What each choice costs, by its number.
struct RecomputeCost {
  std::string name;                     // of the layer
  std::array<int64_t, 3> kept_bytes{};  // from forward to backward
  std::array<double, 3> again_flops{};  // computed in backward once more

  int64_t kept(Recompute choice) const {
    return kept_bytes[static_cast<size_t>(choice)];
  }
  double again(Recompute choice) const {
    return again_flops[static_cast<size_t>(choice)];
  }
};

struct RecomputeChoice {
  std::vector<Recompute> layers;
  int64_t kept_bytes = 0;  // of all layers
  double again_flops = 0;
  /// False: no choice keeps so little. The layers are those that keep least.
  bool fits = true;
};

/// The choice of each layer with the least again_flops of all whose kept_bytes
/// sum to at most `budget_bytes`; among equals the one that keeps less, and
/// then the one that computes later layers again: those bytes wait for their
/// backward the shortest time.
///
/// Exact while at most `most_states` sums are worth remembering, which lists of
/// layers that are mostly alike never come near; beyond, sums that differ by
/// less than 1 / most_states of the budget are taken for one, so what is kept
/// still fits. Time: layers * states.
RecomputeChoice choose_recompute(
    const std::vector<RecomputeCost>& layers, int64_t budget_bytes,
    size_t most_states = 20000);

/// Layers of a list that were counted one after the other: what a layer
/// computes again, but the next one keeps as well, stays for the next one.
///
///   repeated  by layer: what it keeps that an earlier one counts
///             (LayerCost::repeated_bytes of the list as it is)
void keep_for_the_next(
    std::vector<RecomputeCost>& costs, const std::vector<int64_t>& repeated);

/// The choice of each layer. With recompute = "budget" activation_bytes are for
/// `in_flight` microbatches that wait for their backward at once.
///
///   costs  of the layers that this rank has, one for each; read for "budget"
///
/// Throws ConfigError when activation_bytes are too few even if everything is
/// computed again; it names the least, and what else would help.
std::vector<Recompute> plan_recompute(
    const MemoryOptions& options, const std::vector<RecomputeCost>& costs,
    int64_t in_flight = 1);

}  // namespace echelon
