// What held a run back, from its timeline and metrics.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "echelon/planner/plan.h"
#include "echelon/timeline/timeline.h"

namespace echelon {

enum class Fault {
  data_loading, exposed_communication, bubble, stage_imbalance, rank_imbalance,
  straggler, memory_pressure, recompute, small_batch
};

struct RunFinding {
  Fault fault = Fault::data_loading;
  double share = 0;         // of the typical step, measured
  double gain = 0;          // of the step, that the fix would save: simulated
  std::vector<int> ranks;   // whose it is; empty: all
  Reason reason;
};

struct RunExplanation {
  std::string title;
  double step_seconds = 0;       // typical, measured
  double predicted_seconds = 0;  // simulated; 0: this run cannot be
  std::vector<RunFinding> findings;  // the largest share first; empty: nothing
  std::vector<std::string> notes;    // "the timeline ends in step 7: crashed"
};

/// `run`: a run's folder (finished, running or crashed), or a timeline.json. Throws
/// DataError when nothing of it can be read.
RunExplanation explain_run(const std::filesystem::path& run);

}  // namespace echelon
