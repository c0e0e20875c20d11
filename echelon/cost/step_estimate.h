// How long a step takes and what it is spent on, in closed form: microseconds to
// compute, for searches. The simulator (simulator/simulate.h) does the same event
// by event from the same operations; both agree where nothing waits for a neighbour.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "echelon/cost/memory_estimate.h"
#include "echelon/schedule/timing.h"

namespace echelon {

/// Seconds of a step of the slowest rank; they sum to the step.
struct StepParts {
  double matrix = 0;      // matrix products and attention
  double memory = 0;      // operators bound by memory, launches
  double recompute = 0;   // what backward computes again
  std::array<double, 6> exposed{};  // communication by axis (kAxes), not hidden
  double bubble = 0;      // waiting for other stages
  double optimizer = 0;
  double other = 0;       // offload, host, what a stack does beside

  double total() const;
};

/// Before the schedule: what each stage takes for a microbatch, and what follows.
struct StageTimes {
  std::vector<StageCost> stages;  // of a microbatch, communication in them
  std::vector<StepParts> forward, backward;  // of a stage, what it consists of
  double gradients = 0;        // reducing them, of the slowest stage, all
  double gradients_exposed = 0;
  double parameters_exposed = 0;  // gathering (ZeRO)
  double optimizer = 0;
  double other = 0;
};

struct StepEstimate {
  double step_seconds = 0;
  StepParts parts;
  std::array<double, 6> communication{};  // by axis, hidden or not
  double tokens_per_second = 0;           // samples of images
  double model_flops_utilisation = 0;     // causal attention, of the peak
  double full_attention_utilisation = 0;  // as sources with full attention count
  MemoryEstimate memory;
  bool fits = true;
};

/// Throws ConfigError when the strategy is none for this model or cluster
/// (check_strategy).
StageTimes stage_times(
    const ModelShape& model, const Strategy& strategy, const Cluster& cluster);
StepEstimate estimate_step(
    const ModelShape& model, const Strategy& strategy, const Cluster& cluster);

/// Why the strategy is none for this model and cluster ("tp=3 does not divide 32
/// heads; 1, 2, 4 … do"); empty when it is one.
std::string check_strategy(
    const ModelShape& model, const Strategy& strategy, const Cluster& cluster);

}  // namespace echelon
