// `echelon simulate`: what is simulated.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "echelon/cli/arguments.h"
#include "echelon/cluster/cluster.h"
#include "echelon/cost/model_shape.h"
#include "echelon/cost/step_estimate.h"
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
  /// A plan of the layers' own counts has told the memory already.
  bool memory_is_planned = false;
};

struct SimulateCase {
  cost::ModelShape model;
  /// The same model by formulas, where its layers were counted and formulas
  /// exist.
  std::optional<cost::ModelShape> formulas;
  cost::Strategy strategy;
  cluster::Cluster cluster;
  simulator::SimulationOptions options;
  bool with_failures = false;
  simulator::FailureOptions failures;
  bool memory_is_planned = false;
};

/// Throws ConfigError that names the flag that is missing, wrong or given
/// twice.
SimulateCase read_case(const SimulateArguments& arguments);

/// Flags with which the same job fits its devices, and what it takes then.
struct NearestFit {
  std::string flags;  // "--layout fsdp=8,tp=8 --recompute all"
  cost::StepEstimate step;
};

/// The fastest step that fits with the fewest changes: smaller microbatches,
/// more sharding on the same devices, recompute, sequence parallelism. Empty
/// when none of them fits.
std::optional<NearestFit> nearest_fit(const SimulateCase& what);

/// Simulates and prints. Throws ConfigError as read_case does.
int run_simulate(const SimulateArguments& arguments);
/// What run_simulate prints with `json`.
nlohmann::ordered_json simulated_json(const SimulateArguments& arguments);

/// Prints the operators of a step of counted layers by their time, and what
/// bounds them.
void print_operators(const SimulateCase& what, const cost::StepEstimate& step);
/// The same as JSON.
nlohmann::ordered_json operators_json(const SimulateCase& what);
/// Prints what formulas say of the same job, where there are any, and why they
/// differ. `counted` is the step of counted layers.
void print_beside_formulas(
    const SimulateCase& what, const cost::StepEstimate& counted);

}  // namespace echelon::cli
