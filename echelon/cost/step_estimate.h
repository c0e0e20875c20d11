// How long a step takes and what it is spent on, in closed form: microseconds
// to compute, for searches. The simulator (simulator/simulate.h) does the same
// event by event from the same operations; both agree where nothing waits for a
// neighbour.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "echelon/cost/check_strategy.h"
#include "echelon/cost/distinct_pipelines.h"
#include "echelon/cost/memory_estimate.h"
#include "echelon/cost/operation_time.h"
#include "echelon/schedule/timing.h"

namespace echelon {

/// Seconds of a step of the slowest rank; they sum to the step.
struct StepParts {
  double matrix = 0;                // matrix products and attention
  double memory = 0;                // operators bound by memory, launches
  double recompute = 0;             // what backward computes again
  std::array<double, 6> exposed{};  // communication by axis (kAxes), not hidden
  double bubble = 0;                // waiting for other stages
  double optimizer = 0;
  double other = 0;  // offload, host, what a stack does beside

  double total() const;
};

/// Before the schedule: what each stage takes for a microbatch, and what
/// follows.
struct StageTimes {
  std::vector<StageCost> stages;       // of a microbatch, communication in them
  std::vector<int32_t> rank_of_stage;  // pipeline rank
  /// Of a stage and a microbatch: what the costs consist of.
  std::vector<PassSeconds> forward, again, backward_input, backward_weight;
  /// What follows the last microbatch, by pipeline rank.
  struct After {
    double gradients = 0;  // summing them, hidden or not
    double gradients_exposed = 0;
    double parameters = 0;  // gathering them (ZeRO), of the whole step
    double parameters_exposed = 0;
    double tied =
        0;  // summing the gradients of an embedding that two ranks hold
    double optimizer = 0;
    double other = 0;  // offload, host
    double total() const {
      return gradients_exposed + parameters_exposed + tied + optimizer + other;
    }
  };
  std::vector<After> after;
  /// What a rank of the pipeline computes of a microbatch, on average; none
  /// where no host work was measured beside it.
  std::optional<double> computing_seconds;
};

struct StepEstimate {
  double step_seconds = 0;
  StepParts parts;
  std::array<double, 6> communication{};  // by axis, hidden or not
  double tokens_per_second = 0;           // samples of images
  double model_flops_utilisation = 0;     // causal attention, of the peak
  double full_attention_utilisation =
      0;  // as sources with full attention count
  MemoryEstimate memory;
  bool fits = true;
};

/// Throws ConfigError when the strategy is none for this model or cluster
/// (check_strategy).
/// `first_rank`: of the pipeline that is meant; others may run on other
/// devices.
StageTimes stage_times(
    const ModelShape& model, const Strategy& strategy, const Cluster& cluster,
    int64_t first_rank = 0);
StepEstimate estimate_step(
    const ModelShape& model, const Strategy& strategy, const Cluster& cluster);
/// The two parts of it, without asking whether the strategy is one: all but the
/// memory, and the memory of the fullest pipeline against what its devices
/// have.
StepEstimate estimate_time(
    const ModelShape& model, const Strategy& strategy, const Cluster& cluster);
MemoryEstimate fullest_memory(
    const ModelShape& model, const Strategy& strategy, const Cluster& cluster);
/// The same where distinct_pipelines() of the strategy are known already.
StepEstimate estimate_time(
    const ModelShape& model, const Strategy& strategy, const Cluster& cluster,
    const std::vector<PipelinePlace>& pipelines);
MemoryEstimate fullest_memory(
    const ModelShape& model, const Strategy& strategy, const Cluster& cluster,
    const std::vector<PipelinePlace>& pipelines);

/// From the first forward to the last backward of a step, of a stack that
/// validates afterwards those of one rank, the longest. Long schedules are
/// timed by their beginning: once the pipeline is full, each further round of
/// microbatches takes the same.
double pipeline_seconds(
    const Strategy& strategy, const std::vector<StageCost>& stages);
/// The pipeline rank of each stage: v-shaped for zb-v and dualpipev.
std::vector<int32_t> rank_of_stages(const Strategy& strategy);

}  // namespace echelon
