// Simulates a run with other settings.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "echelon/cluster/cluster.h"
#include "echelon/explain/run_record.h"
#include "echelon/predict/configured.h"
#include "echelon/simulator/simulate.h"

namespace echelon {

/// Settings as `--set` takes them: "layout.microbatches=8".
using Settings = std::vector<std::string>;

struct WhatIfStep {
  Settings settings;
  Configured configured;
  StepEstimate step;
  double seconds_per_sample = 0;
};

/// Simulates a run's configuration on a cluster, as it is and changed. Only the
/// ratio of the two counts: a cluster whose rates are guessed errs the same way
/// in both.
class WhatIf {
 public:
  /// Without `cluster`, takes that of a simulated run, or this machine
  /// (cluster/local_cluster.h). Takes the run's counted layers if it has them,
  /// else those of formulas. Tries settings until that has taken `seconds`: see
  /// num_left_out().
  WhatIf(
      const RunRecord& run, const std::optional<Cluster>& cluster,
      double seconds = 10);

  /// The run as it is; empty: it cannot be simulated, and why() says why.
  const std::optional<WhatIfStep>& base() const { return base_; }
  const std::string& why() const { return why_; }
  const Cluster& cluster() const { return cluster_; }
  /// Whether its rates are guesses, so that times do not compare with the
  /// run's.
  bool is_guessed() const { return guessed_; }

  /// How many settings were left out, because they would have taken too long.
  int64_t num_left_out() const { return left_out_; }
  /// Why no setting is a fix: `why`, unless settings were left out.
  std::string none_found(const std::string& why) const;

  /// Empty when there is no base, the settings are invalid for this run, or
  /// they were left out.
  std::optional<WhatIfStep> with(const Settings& settings) const;
  /// The share by which a sample's time falls; negative: it rises.
  double gain(const WhatIfStep& other) const;
  /// The step that fits and gains most, at least `least`, if there is one.
  std::optional<WhatIfStep>
  best_of(const std::vector<Settings>& all, double least = 0.01) const;

 private:
  void find_cluster_of(const RunRecord& run);
  WhatIfStep simulated(const Settings& settings) const;
  bool has_time_for(const Strategy& strategy) const;

  const RunRecord& run_;
  std::optional<DataFacts> data_;  // looked at once; fixes leave it as it is
  Cluster cluster_;
  bool guessed_ = false;
  double seconds_;  // the budget for simulations
  mutable double spent_ = 0;
  mutable int64_t left_out_ = 0;
  double seconds_of_pass_ = 0;  // for simulating a pass of the base
  std::optional<WhatIfStep> base_;
  std::string why_;
};

}  // namespace echelon
