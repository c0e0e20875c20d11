// Runs a step on a cluster that is not there, event by event: the schedule's
// actions, each layer's operations, every collective on its links.
#pragma once

#include <cstdint>
#include <vector>

#include "echelon/cost/step_estimate.h"
#include "echelon/timeline/timeline.h"

namespace echelon {

struct SimulationOptions {
  int64_t steps =
      1;  // one: of median length, where steps differ by measured jitter
  /// Ranks that do the same at the same time are simulated once. Off: each rank
  /// by itself, for tests; without jitter both give the same.
  bool symmetry = true;
  /// Of an operation's time, normal, as a share; each rank draws its own,
  /// beside what a measured device has (Device::jitter_seconds).
  double jitter = 0;
  /// Ranks that are slower by this factor, chosen by seed.
  int64_t stragglers = 0;
  double straggler_factor = 1.0;
  uint64_t seed = 0;
  /// Spans of the timeline: of how many ranks at most; 0: none.
  int64_t timeline_ranks = 16;
  int64_t timeline_steps = 20;  // the first ones
};

struct SimulatedRun {
  StepEstimate step;                 // of a typical step; parts from the events
  std::vector<double> step_seconds;  // each
  Timeline timeline;                 // as a real run writes it
  int64_t simulated_ranks = 0;
  int64_t events = 0;
};

/// Throws ConfigError as estimate_step does.
SimulatedRun simulate(
    const ModelShape& model, const Strategy& strategy, const Cluster& cluster,
    const SimulationOptions& options = {});

}  // namespace echelon
