// Simulates steps on a cluster, event by event: the schedule's actions, each
// layer's operations, every collective on its links.
#pragma once

#include <cstdint>
#include <vector>

#include "echelon/cost/step_estimate.h"
#include "echelon/timeline/timeline.h"

namespace echelon::simulator {

struct SimulationOptions {
  int64_t steps = 1;
  /// Simulates ranks that do the same at the same time once. Off, for tests:
  /// each rank by itself, with the same result unless there is jitter.
  bool symmetry = true;
  /// Standard deviation of an operation's time, as a share of it; each rank
  /// draws its own.
  double jitter = 0;
  /// How many ranks, chosen by seed, are slower by the factor.
  int64_t stragglers = 0;
  double straggler_factor = 1.0;
  uint64_t seed = 0;
  /// The most ranks whose spans the timeline has, all of a pipeline or none of
  /// it; one pipeline may have more. 0: no timeline.
  int64_t timeline_ranks = 16;
  int64_t timeline_steps = 20;  // it has the first ones
};

struct SimulatedRun {
  cost::StepEstimate step;           // the median step; parts from the events
  std::vector<double> step_seconds;  // by step
  timeline::Timeline timeline;       // as a real run writes it
  int64_t simulated_ranks = 0;
  int64_t events = 0;
};

/// Throws ConfigError as estimate_step does.
SimulatedRun simulate(
    const cost::ModelShape& model, const cost::Strategy& strategy,
    const cluster::Cluster& cluster, const SimulationOptions& options = {});

}  // namespace echelon::simulator
