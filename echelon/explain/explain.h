// Finds what held a run back, from its timeline, metrics and configuration.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "echelon/cluster/cluster.h"
#include "echelon/planner/plan.h"
#include "echelon/report/report.h"
#include "echelon/timeline/overlap.h"

namespace echelon::explain {

struct ExplainOptions {
  /// The cluster on which fixes are simulated; empty: this machine.
  std::optional<cluster::Cluster> cluster;
  /// The approximate time for simulating fixes. Fixes for which there is no
  /// time are left out, which a note says.
  double simulation_seconds = 10;
};

enum class Fault {
  data_loading,
  exposed_communication,
  bubble,
  stage_imbalance,
  rank_imbalance,
  straggler,
  memory_pressure,
  recompute,
  small_batch,
  slow_machine
};

/// "data loading", "communication not overlapped", …
std::string_view to_string(Fault fault);

/// Where a gain comes from.
enum class GainSource {
  none,       // nobody can say
  measured,   // from the run's own spans
  replayed,   // the run's own passes, in the fix's order
  simulated,  // the run's configuration with and without the fix
};

/// A fault that held a run back, and its fix.
struct RunFinding {
  Fault fault = Fault::data_loading;
  std::string axis;  // of communication: "dp"; else empty
  double share = 0;  // of the typical step, measured
  /// The share of a sample's time that the fix would save; negative: it costs
  /// time.
  double gain = 0;
  GainSource gain_source = GainSource::none;
  std::vector<int> ranks;  // that have the fault; empty: all
  /// What to set, as `--set` takes it: "layout.microbatches=8". Empty when the
  /// fix is not a setting.
  std::vector<std::string> settings;
  planner::Reason reason;
};

/// "communication not overlapped (dp), 12 % of the step".
std::string title_of(const RunFinding& finding);

/// "12 % of a sample's time, by the simulator"; empty when nobody can say.
std::string gain_text(const RunFinding& finding);

/// "train.batch = 64, train.accumulate = 4".
std::string to_text(const std::vector<std::string>& settings);

/// Settings as tables of a configuration, with their keys below.
std::string to_tables(const std::vector<std::string>& settings);

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
  std::vector<timeline::ComparedPart>
      parts;                         // simulated and measured; empty: not known
  std::vector<RunFinding> findings;  // the largest share first; empty: nothing
  /// What took most of the step besides computing, as a sentence or two, where
  /// nothing was found; else empty.
  std::string largest_wait;
  std::vector<std::string> notes;  // "the timeline is truncated in rank 3"
};

/// `run`: a run's folder (finished, running or crashed), or a timeline.json.
/// What is missing or truncated is left out, and notes say so. Throws DataError
/// when nothing of the run can be read.
RunExplanation explain_run(
    const std::filesystem::path& run, const ExplainOptions& options = {});

/// The findings and notes as the page of the run shows them.
report::ReportFindings findings_for_page(const RunExplanation& run);

}  // namespace echelon::explain
