// What `echelon simulate` prints and writes.
#pragma once

#include <iosfwd>
#include <optional>
#include <string>

#include "echelon/cli/simulate_case.h"
#include "echelon/cli/simulate_config.h"

namespace echelon::cli {

struct SimulateResult {
  SimulatedRun run;
  std::optional<EffectiveTime> weeks;  // with --hours
  double wall_seconds = 0;             // that simulating took
};

void print_simulation_text(
    const SimulateCase& what, const SimulateResult& result, std::ostream& out);
void print_simulation_json(
    const SimulateCase& what, const SimulateResult& result, std::ostream& out);

/// Writes timeline.json, metrics.jsonl, report.html, cluster.toml and, where
/// they are known, config.toml and layers.json into the new folder `path`.
void write_simulated_run(
    const SimulateCase& what, const SimulateResult& result,
    const SimulatedConfiguration& configuration, const std::string& path);

}  // namespace echelon::cli
