// How the router of a layer spread tokens over its experts, in one step.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace echelon::timeline {

/// Over all ranks and microbatches of a step. A token counts for each of its
/// experts.
struct ExpertLoads {
  std::string layer;            // "model.layers.0.mlp"
  std::vector<int64_t> chosen;  // by expert: tokens that chose it
  /// How many of these were dropped ([model] capacity_factor); empty: none in
  /// the whole layer.
  std::vector<int64_t> dropped;

  int64_t total() const;
  /// The largest load over the mean, 1 or more; 0 without tokens.
  double imbalance() const;

  bool operator==(const ExpertLoads&) const = default;
};

/// `counts` has the tokens that chose each expert, layer after layer, and then
/// the dropped ones in the same order.
std::vector<ExpertLoads> expert_loads(
    const std::vector<std::string>& layers, const std::vector<int64_t>& counts);

/// The largest of the layers' imbalances.
double imbalance_of(const std::vector<ExpertLoads>& layers);
/// The share of all choices of experts that was dropped, 0 to 1.
double dropped_share(const std::vector<ExpertLoads>& layers);

/// "expert 3 of model.layers.0.mlp, 61.5 % of its own": the expert with the
/// most dropped tokens. `layers` have some.
std::string most_dropped(const std::vector<ExpertLoads>& layers);

}  // namespace echelon::timeline
