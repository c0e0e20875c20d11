// Finds what held a run back, from its timeline, metrics and configuration.
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
  /// The cluster on which fixes are simulated; empty: this machine.
  std::optional<Cluster> cluster;
  /// The approximate time for simulating fixes. Fixes for which there is no
  /// time are left out, which a note says.
  double simulation_seconds = 10;
};

struct RunExplanation {
  std::string title;       // "gpt on text"
  std::string layout;      // "dp=2,pp=2"; empty: not known
  bool simulated = false;  // written by `echelon simulate --run`, not measured
  int64_t ranks = 0;       // about which something is known
  int64_t recorded_steps = 0;  // with spans; 0: metrics are all there is
  double step_seconds = 0;     // typical, measured
  double compute_share = 0;    // of the step, mean over ranks; 0: not known
  std::string cluster;         // on which fixes were simulated; empty: none
  /// The simulated step of the run as it is, on that cluster; 0: not known.
  double predicted_seconds = 0;
  bool counted_layers = false;  // the run's own counts, not those of formulas
  std::vector<ComparedPart> parts;   // simulated and measured; empty: not known
  std::vector<RunFinding> findings;  // the largest share first; empty: nothing
  std::vector<std::string> notes;    // "the timeline is truncated in rank 3"
};

/// `run`: a run's folder (finished, running or crashed), or a timeline.json.
/// What is missing or truncated is left out, and notes say so. Throws DataError
/// when nothing of the run can be read.
RunExplanation explain_run(
    const std::filesystem::path& run, const ExplainOptions& options = {});

}  // namespace echelon
