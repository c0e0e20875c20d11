// A new division of the batch among data-parallel ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace echelon::timeline {

/// After `step` steps, each data-parallel rank has another share of the batch.
struct Rebalance {
  int64_t step = 0;
  std::vector<int64_t> before;  // samples of a full batch, by rank
  std::vector<double> seconds;  // that each rank worked in a step for them
  std::vector<int64_t> after;   // samples from now on

  /// How long the slowest rank works in a step.
  double slowest_before() const;
  /// The same after it, if a rank's time is in proportion to its samples.
  double slowest_after() const;

  bool operator==(const Rebalance&) const = default;
};

/// "after step 22: ranks work 8 ms, 24 ms for 32, 32 samples; from now on they
/// take 48, 16, with which the slowest should work 12 ms instead of 24 ms".
/// Lists of many ranks are shortened.
std::string to_text(const Rebalance& rebalance);

}  // namespace echelon::timeline
