// Which layers to recompute in backward, so that activations fit a budget with
// the least recompute. Free of LibTorch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "echelon/options/memory.h"

namespace echelon::cost {

/// How much of a layer backward recomputes: nothing; everything except its
/// matmuls and attention; everything.
enum class Recompute { none, selective, all };

inline constexpr std::array<Recompute, 3> kRecomputes = {
    Recompute::none, Recompute::selective, Recompute::all};

/// "none", "selective", "all": the values of memory.recompute.
std::string to_string(Recompute recompute);

/// The choice that an option makes for all layers; none for
/// Recompute::budget, where layers differ.
std::optional<Recompute> recompute_of(echelon::Recompute option);

/// The cost of each choice; arrays are indexed by Recompute.
struct RecomputeCost {
  std::string name;                     // of the layer
  std::array<int64_t, 3> kept_bytes{};  // from forward to backward
  std::array<double, 3> again_flops{};  // recomputed in backward

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
  /// False when no choice fits; the layers are then the choice that keeps
  /// least.
  bool fits = true;
};

/// The choice with the least again_flops among those whose kept_bytes sum to at
/// most `budget_bytes`; among equals the one that keeps less, then the one that
/// recomputes later layers, whose bytes wait the shortest for their backward.
///
/// Exact while at most `most_states` sums matter; lists of mostly equal layers
/// stay far below. Beyond that, sums that differ by less than 1 / most_states
/// of the budget count as one, so that the choice still fits. Time: layers *
/// states.
RecomputeChoice choose_recompute(
    const std::vector<RecomputeCost>& layers, int64_t budget_bytes,
    size_t most_states = 20000);

/// For layers of a list that were counted one after the other: what a layer
/// recomputes but the next one also keeps, stays for the next one.
///
///   repeated  by layer: what it keeps that an earlier one counts
///             (LayerCost::repeated_bytes of the list as it is)
void keep_for_the_next(
    std::vector<RecomputeCost>& costs, const std::vector<int64_t>& repeated);

/// The choice for each layer. With Recompute::budget, activation_bytes are
/// for `in_flight` microbatches that wait for their backward at the same time.
///
///   costs  one for each layer of this rank; read for a budget
///
/// Throws ConfigError when activation_bytes are too few even if everything is
/// recomputed; it names the minimum, and what else would help.
std::vector<Recompute> plan_recompute(
    const MemoryOptions& options, const std::vector<RecomputeCost>& costs,
    int64_t in_flight = 1);

}  // namespace echelon::cost
