// How unevenly a router spreads tokens over the ranks that share a mixture's
// experts. All ranks wait for the one with the most.
#pragma once

#include <cstdint>
#include <vector>

#include "echelon/timeline/metrics.h"

namespace echelon::cost {

struct ExpertLoad {
  /// Tokens of the busiest rank over the mean of all, 1 or more, whatever the
  /// number of ranks is. Read when `layers` is empty.
  double busiest = 1;
  /// By layer: the tokens that chose each expert.
  std::vector<std::vector<double>> layers;

  /// What the busiest of `ep` ranks computes and receives, over the mean; where
  /// layers were measured, the mean of their busiest. Ranks have equally many
  /// neighbouring experts. 1 for one rank.
  double of_busiest_rank(int64_t ep) const;

  bool operator==(const ExpertLoad&) const = default;
};

/// The loads that a run's metrics have, of the second half of them: a router is
/// most uneven when training begins. Even where the metrics have none.
ExpertLoad measured_load(const std::vector<timeline::StepMetrics>& steps);

}  // namespace echelon::cost
