// How long a step takes and what it is spent on, in closed form: searches need
// an answer in microseconds. The simulator (simulator/simulate.h) does the same
// event by event from the same operations; the two agree where nothing waits
// for a neighbour.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "echelon/cost/distinct_pipelines.h"
#include "echelon/cost/memory_estimate.h"
#include "echelon/cost/operation_time.h"
#include "echelon/schedule/timing.h"

namespace echelon::cost {

/// Seconds of a step of the slowest rank; they sum to the step.
struct StepParts {
  double matrix = 0;                // matmuls and attention
  double memory = 0;                // operators bound by memory, launches
  double recompute = 0;             // activation recompute in backward
  std::array<double, 6> exposed{};  // communication by axis (kAxes), not hidden
  double bubble = 0;                // waiting for other stages
  double optimizer = 0;
  double other = 0;  // offload, host overhead

  double total() const;
};

/// The time of each stage for a microbatch, before scheduling, and of what
/// follows the last one.
struct StageTimes {
  std::vector<StageCost> stages;       // of a microbatch, with communication
  std::vector<int32_t> rank_of_stage;  // pipeline rank
  /// The passes that each stage's cost consists of, for a microbatch.
  std::vector<PassSeconds> forward, again, backward_input, backward_weight;
  /// What follows the last microbatch, by pipeline rank.
  struct After {
    double gradients = 0;  // summing them, hidden or not
    double gradients_exposed = 0;
    double parameters = 0;  // all-gathers (ZeRO), of the whole step
    double parameters_exposed = 0;
    double tied = 0;  // all-reduce of a tied embedding's gradients
    double optimizer = 0;
    double other = 0;  // offload, host
    double total() const {
      return gradients_exposed + parameters_exposed + tied + optimizer + other;
    }
  };
  std::vector<After> after;
};

struct StepEstimate {
  double step_seconds = 0;
  StepParts parts;
  std::array<double, 6> communication{};  // by axis, hidden or not
  double tokens_per_second = 0;           // samples of images
  double model_flops_utilisation = 0;     // causal attention, of the peak
  double full_attention_utilisation = 0;  // counting attention as not causal
  MemoryEstimate memory;
  bool fits = true;
};

/// Why the strategy is invalid for this model and cluster ("tp=3 does not
/// divide 32 heads; 1, 2, 4, 8, 16 and 32 do"); empty when it is valid. Whether
/// it fits the memory is another question (memory_estimate.h).
std::string check_strategy(
    const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster);

/// Throws ConfigError when the strategy is invalid (check_strategy).
/// `first_rank`: of the pipeline in question; others may run on other devices.
StageTimes stage_times(
    const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster, int64_t first_rank = 0);
StepEstimate estimate_step(
    const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster);
/// The two parts of estimate_step, without check_strategy: everything but the
/// memory, and the memory of the fullest pipeline with its devices' limits.
StepEstimate estimate_time(
    const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster);
MemoryEstimate fullest_memory(
    const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster);
/// The same with the strategy's distinct_pipelines() already known.
StepEstimate estimate_time(
    const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster,
    const std::vector<PipelinePlace>& pipelines);
MemoryEstimate fullest_memory(
    const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster,
    const std::vector<PipelinePlace>& pipelines);

/// Seconds from the first forward to the last backward of a step; for a
/// framework that validates afterwards, those of the slowest rank. Long
/// schedules are extrapolated from their beginning: once the pipeline is full,
/// each further round of microbatches takes the same time.
double pipeline_seconds(
    const Strategy& strategy, const std::vector<StageCost>& stages);
/// The pipeline rank of each stage: v-shaped for zb-v and dualpipev.
std::vector<int32_t> rank_of_stages(const Strategy& strategy);

}  // namespace echelon::cost
