// `echelon simulate`: what is simulated, its result, and its output.
#pragma once

#include <iosfwd>
#include <optional>
#include <string>

#include "echelon/cli/arguments.h"
#include "echelon/cluster/cluster.h"
#include "echelon/cost/model_shape.h"
#include "echelon/cost/strategy.h"
#include "echelon/simulator/effective_time.h"
#include "echelon/simulator/simulate.h"

namespace echelon::cli {

/// Flags as written; empty: not given.
struct SimulateArguments : JobFlags {
  std::string config;  // CONFIG.toml, instead of model and strategy
  std::string layers;  // a file of counted layers, instead of its formulas
  bool count = false;  // count the layers now
  std::string layout, microbatch;
  std::string schedule, stages_per_rank, recompute, zero;
  bool sequence_parallel = false;
  std::string steps, jitter, stragglers, straggler_factor, seed;
  std::string hours, mean_hours_between_failures;
  std::string checkpoint_seconds, checkpoint_interval_seconds, recovery_seconds;
  std::string run;  // the folder to write
  bool json = false;
};

struct SimulateCase {
  ModelShape model;
  Strategy strategy;
  Cluster cluster;
  SimulationOptions options;
  bool with_failures = false;
  FailureOptions failures;
};

/// Throws ConfigError that names the flag that is missing, wrong or given
/// twice.
SimulateCase read_case(const SimulateArguments& arguments);

struct SimulateResult {
  SimulatedRun run;
  std::optional<EffectiveTime> weeks;  // with --hours
  double wall_seconds = 0;             // of the simulation itself
};

// simulate_print.cpp
void print_simulation_text(
    const SimulateCase& what, const SimulateResult& result, std::ostream& out);
void print_simulation_json(
    const SimulateCase& what, const SimulateResult& result, std::ostream& out);

// simulate_run.cpp
struct SimulatedConfiguration {
  std::string text;     // config.toml; empty: `echelon train` has no such model
  std::string missing;  // settings that it lacks, and why; empty: none
};

/// CONFIG with the changes of the flags. For a model of the catalogue it is
/// what the planner would print, without data to train on (images: random
/// ones). Throws ConfigError where `echelon train` does not accept a flag.
SimulatedConfiguration
configuration_of(const SimulateArguments& arguments, const SimulateCase& what);

/// Writes timeline.json, metrics.jsonl, report.html, cluster.toml and, where
/// they are known, config.toml and layers.json into the new folder `path`.
void write_simulated_run(
    const SimulateCase& what, const SimulateResult& result,
    const SimulatedConfiguration& configuration, const std::string& path);

}  // namespace echelon::cli
