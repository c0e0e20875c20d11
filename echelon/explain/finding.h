// A fault that held a run back, and its fix.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "echelon/planner/plan.h"

namespace echelon {

enum class Fault {
  data_loading,
  exposed_communication,
  bubble,
  stage_imbalance,
  rank_imbalance,
  straggler,
  memory_pressure,
  recompute,
  small_batch
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
  Reason reason;
};

/// "train.batch = 64, train.accumulate = 4".
std::string to_text(const std::vector<std::string>& settings);

/// Settings as tables of a configuration, with their keys below.
std::string to_tables(const std::vector<std::string>& settings);

}  // namespace echelon
