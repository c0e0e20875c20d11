// A new division of the work while a run trains: of the batch among
// data-parallel ranks, or of the layers among pipeline stages.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace echelon::timeline {

/// What is divided.
enum class Divided { samples, layers };

/// After `step` steps, each data-parallel rank has another share of the batch,
/// or each stage other layers.
struct Rebalance {
  int64_t step = 0;
  /// Samples of a full batch, by data-parallel rank; layers, by stage.
  std::vector<int64_t> before;
  /// That each rank worked in a step for them, by data-parallel or by pipeline
  /// rank.
  std::vector<double> seconds;
  std::vector<int64_t> after;  // from now on
  Divided of = Divided::samples;
  double expected_seconds = 0;  // of layers: slowest_after()

  /// How long the slowest rank works in a step.
  double slowest_before() const;
  /// The same after it, if a rank's time is in proportion to its samples, or to
  /// the work of its layers.
  double slowest_after() const;

  bool operator==(const Rebalance&) const = default;
};

/// "after step 22: ranks work 8 ms, 24 ms for 32, 32 samples; from now on they
/// take 48, 16, with which the slowest should work 12 ms instead of 24 ms", or
/// "…: pipeline ranks work 8 ms, 24 ms with stages of 4, 4 layers; …".
/// Lists of many ranks are shortened.
std::string to_text(const Rebalance& rebalance);

}  // namespace echelon::timeline
