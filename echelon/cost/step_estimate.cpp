// A step lasts as long as its slowest pipeline. A pipeline takes the length of
// its schedule for all microbatches, and then what the rank with the most left
// to do takes: gradients that nothing hides, the optimizer, and sums of tied
// embeddings. That rank's time is divided into parts; what the others' schedule
// leaves idle on it is the bubble.
#include "echelon/cost/step_estimate.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "echelon/cost/layer_work.h"
#include "echelon/error.h"

namespace echelon::cost {
namespace {

void add(
    StepEstimate& step, double factor, const PassSeconds& pass, bool again) {
  StepParts& parts = step.parts;
  if (again) {
    parts.recompute += factor * pass.computation();
  } else {
    parts.matrix += factor * pass.matrix;
    parts.memory += factor * (pass.memory + pass.host);
  }
  for (size_t axis = 0; axis < parts.exposed.size(); ++axis) {
    parts.exposed[axis] += factor * pass.exposed[axis];
    step.communication[axis] += factor * pass.communication[axis];
  }
}

/// The axis that gradients are summed along, for the report.
Axis data_axis(const Strategy& strategy) {
  return strategy.layout.dp_shard > 1 ? Axis::dp_shard : Axis::dp_replicate;
}

double peak_of(const cluster::Cluster& cluster, const Strategy& strategy) {
  double sum = 0;
  int64_t left = strategy.layout.num_ranks();
  for (const cluster::NodeGroup& group : cluster.groups) {
    const int64_t here = std::min(left, group.count * group.node.num_devices);
    double peak = group.node.device.peak(strategy.precision);
    if (peak == 0) peak = group.node.device.peak(cluster::Precision::fp32);
    sum += as_double(here) * peak;
    left -= here;
  }
  return sum;
}

void add_utilisation(
    StepEstimate& step, const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster) {
  const int64_t seq = strategy.seq_len_or(model.seq_len);
  const double samples = as_double(strategy.global_batch);
  step.tokens_per_second =
      samples * as_double(std::max<int64_t>(1, seq)) / step.step_seconds;
  const double peak = peak_of(cluster, strategy) * step.step_seconds;
  if (peak <= 0) return;
  step.model_flops_utilisation = samples * model.model_flops(seq, false) / peak;
  step.full_attention_utilisation =
      samples * model.model_flops(seq, true) / peak;
}

/// A step of the pipeline that begins at `first_rank`, if the others are like
/// it.
StepEstimate pipeline_estimate(
    const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster, int64_t first_rank) {
  const StageTimes times = stage_times(model, strategy, cluster, first_rank);
  const double microbatches = as_double(strategy.num_microbatches());
  const double span = pipeline_seconds(strategy, times.stages);
  // A pipeline rank's gradients begin when its own backward ends, which in all
  // schedules is near the end; the slowest to finish is the step's end.
  size_t slowest = 0;
  std::vector<double> busy(times.after.size(), 0);
  for (size_t stage = 0; stage < times.stages.size(); ++stage) {
    busy[static_cast<size_t>(times.rank_of_stage[stage])] +=
        microbatches *
        (times.stages[stage].forward + times.stages[stage].backward);
  }
  for (size_t rank = 0; rank < busy.size(); ++rank) {
    if (times.after[rank].total() > times.after[slowest].total())
      slowest = rank;
  }
  const StageTimes::After& after = times.after[slowest];
  StepEstimate step;
  step.step_seconds = span + after.total();
  StepParts& parts = step.parts;
  for (size_t stage = 0; stage < times.stages.size(); ++stage) {
    if (static_cast<size_t>(times.rank_of_stage[stage]) != slowest) continue;
    for (const auto* passes :
         {&times.forward, &times.again, &times.backward_input,
          &times.backward_weight}) {
      add(step, microbatches, (*passes)[stage], passes == &times.again);
    }
    step.communication[index_of(Axis::pp)] +=
        2 * microbatches * times.stages[stage].transfer;
  }
  parts.bubble = span - busy[slowest];
  const size_t data = index_of(data_axis(strategy));
  parts.exposed[data] += after.gradients_exposed + after.parameters_exposed;
  step.communication[data] += after.gradients + after.parameters;
  parts.exposed[index_of(Axis::pp)] += after.tied;
  step.communication[index_of(Axis::pp)] += after.tied;
  parts.optimizer = after.optimizer;
  parts.other = after.other;
  return step;
}

Strategy own_strategy(const Strategy& strategy, const PipelinePlace& pipeline) {
  return with_microbatch(
      strategy, microbatch_of(strategy, pipeline.data_index));
}

/// The bytes that the devices of a pipeline have for the job, by pipeline rank.
std::vector<double>
limits_of(const PipelinePlace& pipeline, const cluster::Cluster& cluster) {
  std::vector<double> limits;
  limits.reserve(pipeline.groups.size());
  for (const int64_t group : pipeline.groups) {
    limits.push_back(
        usable_bytes(cluster.groups[static_cast<size_t>(group)].node.device));
  }
  return limits;
}

}  // namespace

double StepParts::total() const {
  return std::accumulate(
      exposed.begin(), exposed.end(),
      matrix + memory + recompute + bubble + optimizer + other);
}

// The slowest of the pipelines: gradients are summed over all of them.
StepEstimate estimate_time(
    const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster,
    const std::vector<PipelinePlace>& pipelines) {
  StepEstimate slowest;
  for (const auto& pipeline : pipelines) {
    const StepEstimate step = pipeline_estimate(
        model, own_strategy(strategy, pipeline), cluster, pipeline.first_rank);
    if (step.step_seconds > slowest.step_seconds) slowest = step;
  }
  add_utilisation(slowest, model, strategy, cluster);
  return slowest;
}

StepEstimate estimate_time(
    const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster) {
  return estimate_time(
      model, strategy, cluster, distinct_pipelines(strategy, cluster));
}

MemoryEstimate fullest_memory(
    const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster) {
  return fullest_memory(
      model, strategy, cluster, distinct_pipelines(strategy, cluster));
}

MemoryEstimate fullest_memory(
    const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster,
    const std::vector<PipelinePlace>& pipelines) {
  MemoryEstimate fullest, memory;
  double most = 0;
  std::optional<int64_t> samples;  // that `memory` is of
  for (const auto& pipeline : pipelines) {
    // Pipelines on other devices differ in what those have alone.
    const int64_t own = microbatch_of(strategy, pipeline.data_index);
    if (samples != own) {
      memory = estimate_memory(model, with_microbatch(strategy, own));
      samples = own;
    }
    memory.limits = limits_of(pipeline, cluster);
    const double share = memory.fullness();
    if (share <= most) continue;
    most = share;
    fullest = memory;
  }
  return fullest;
}

StepEstimate estimate_step(
    const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster) {
  if (const std::string why = check_strategy(model, strategy, cluster);
      !why.empty()) {
    throw ConfigError(why);
  }
  const auto pipelines = distinct_pipelines(strategy, cluster);
  StepEstimate step = estimate_time(model, strategy, cluster, pipelines);
  step.memory = fullest_memory(model, strategy, cluster, pipelines);
  step.fits = step.memory.fullness() <= 1;
  return step;
}

}  // namespace echelon::cost
