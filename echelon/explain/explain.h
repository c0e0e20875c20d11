// What held a run back, from its timeline, metrics and configuration.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "echelon/cluster/cluster.h"
#include "echelon/explain/finding.h"
#include "echelon/timeline/timed_parts.h"

namespace echelon {

struct ExplainOptions {
  /// That fixes are simulated on; empty: this machine.
  std::optional<Cluster> cluster;
  /// For simulating fixes, about; what there is no time for is left out, and
  /// noted.
  double simulation_seconds = 10;
};

struct RunExplanation {
  std::string title;   // "gpt on text"
  std::string layout;  // "dp=2,pp=2"; empty: not known
  bool simulated =
      false;          // nothing was measured: `echelon simulate --run` wrote it
  int64_t ranks = 0;  // that something is known of
  int64_t recorded_steps = 0;  // with spans; 0: metrics are all there is
  double step_seconds = 0;     // typical, measured
  double compute_share = 0;    // of it, mean over ranks; 0: not known
  std::string cluster;         // that fixes were simulated on; empty: none
  /// What the simulator says of the run as it is, on that cluster, beside what
  /// was measured; empty where either is not known.
  double predicted_seconds = 0;
  bool counted_layers =
      false;  // as the run counted them; else those of formulas
  std::vector<ComparedPart> parts;
  std::vector<RunFinding> findings;  // the largest share first; empty: nothing
  std::vector<std::string> notes;    // "the timeline is cut off in rank 3"
};

/// `run`: a run's folder (finished, running or crashed), or a timeline.json.
/// What is missing or cut off is left out, and noted. Throws DataError when
/// nothing of it can be read.
RunExplanation explain_run(
    const std::filesystem::path& run, const ExplainOptions& options = {});

}  // namespace echelon
