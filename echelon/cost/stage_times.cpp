// The cost of a stage is that of its passes, each layer's once (PassTimes), and
// of its transfers: beside computing, or in the stage's own time where the
// framework blocks. What follows the last microbatch belongs to a rank, not to
// a stage, since a rank's stages share their reductions and one optimizer step.
#include <algorithm>
#include <cmath>

#include "echelon/cost/layer_work.h"
#include "echelon/cost/memory_estimate.h"
#include "echelon/cost/rank_times.h"
#include "echelon/cost/step_estimate.h"

namespace echelon::cost {
namespace {

/// The first and the last rank of a pipeline sum the gradients of a tied
/// embedding.
double tied_seconds(const StageContext& context) {
  if (!context.model.transformer) return 0;
  const double elements = copied_embedding(
      *context.model.transformer, context.strategy, context.framework);
  const cluster::Cluster& cluster = context.cluster;
  const int64_t first = context.rank_of(0);
  const int64_t last = context.rank_of(context.strategy.layout.pp - 1);
  const bool near = cluster.node_index(first) == cluster.node_index(last);
  const GroupPlace pair{
      .ranks = 2, .ranks_per_node = near ? 2 : 1, .nodes = near ? 1 : 2};
  return context.seconds_of(
      CollectiveKind::all_reduce,
      elements * reduced_bytes(context.strategy, context.framework), pair,
      first);
}

/// Gradients to the host, parameters back; between them the update reads and
/// writes masters and two moments in the host's memory, no faster than the link
/// to it where the cluster does not say how fast that is.
double offloaded_optimizer_seconds(
    const StageContext& context, double elements, const cluster::Node& node) {
  const double memory = node.host_memory_bytes_per_second > 0
                            ? node.host_memory_bytes_per_second *
                                  rates_of(node.device).host_memory_share
                            : node.host.bytes_per_second;
  // An element moves 28 bytes: 24 for the master and two moments, which are
  // read and written, and 4 for the gradient, which is read.
  return elements * ((reduced_bytes(context.strategy, context.framework) +
                      element_bytes(context.strategy.precision)) /
                         node.host.bytes_per_second +
                     28 / memory);
}

double
optimizer_seconds(const StageContext& context, double elements, int64_t rank) {
  const cluster::Node& node = context.cluster.node_of(rank);
  if (context.strategy.offload_optimizer) {
    return offloaded_optimizer_seconds(context, elements, node);
  }
  const auto measured = measured_update_seconds(
      node.device, context.strategy.optimizer, elements,
      context.strategy.master == cluster::Precision::fp64 ? 8 : 4);
  if (measured) return *measured;
  return memory_seconds(
      elements * context.framework.optimizer_bytes, node.device,
      rates_of(node.device));
}

/// Activations of a rank's stages to the host and back, beside computation.
double offload_seconds(
    const StageContext& context, double kept_bytes, int64_t rank,
    const StageCost& cost) {
  const double copy =
      kept_bytes / context.cluster.node_of(rank).host.bytes_per_second;
  return as_double(context.strategy.num_microbatches()) *
         (std::max(0.0, copy - cost.forward) +
          std::max(0.0, copy - cost.backward));
}

/// `stages`: the layers of one rank, by stage.
StageTimes::After after_of(
    const StageContext& context, PassTimes& passes,
    const std::vector<Layers>& stages, int64_t rank) {
  Layers layers;
  for (const Layers& stage : stages) {
    layers.insert(layers.end(), stage.begin(), stage.end());
  }
  ParameterTimes sums = parameter_times(context, passes, layers, rank);
  if (stages.size() > 1 &&
      gradients_are_reduced_often(context.strategy, context.framework)) {
    // Each backward of a stage ends with reductions of its own.
    sums.gradients = {};
    for (const Layers& stage : stages) {
      const Exposed one =
          parameter_times(context, passes, stage, rank).gradients;
      sums.gradients.all += one.all;
      sums.gradients.exposed += one.exposed;
    }
  }
  return {
      .gradients = sums.gradients.all,
      .gradients_exposed = sums.gradients.exposed,
      .parameters = sums.parameters.all,
      .parameters_exposed = sums.parameters.exposed,
      .optimizer =
          optimizer_seconds(context, own_elements(context, layers, rank), rank),
      .other = context.framework.step_host_seconds};
}

using StageWork = std::vector<std::vector<LayerWork>>;

Layers pointers(const std::vector<LayerWork>& stage) {
  Layers layers;
  for (const LayerWork& layer : stage) layers.push_back(&layer);
  return layers;
}

void add_passes(
    const StageContext& context, PassTimes& passes, const StageWork& work,
    StageTimes& times) {
  for (size_t stage = 0; stage < work.size(); ++stage) {
    const int64_t rank = context.rank_of(times.rank_of_stage[stage]);
    const Layers layers = pointers(work[stage]);
    times.forward.push_back(passes.of(layers, rank, &LayerWork::forward));
    times.again.push_back(passes.of(layers, rank, &LayerWork::again));
    times.backward_input.push_back(
        passes.of(layers, rank, &LayerWork::backward_input));
    times.backward_weight.push_back(
        passes.of(layers, rank, &LayerWork::backward_weight));
    StageCost cost;
    cost.forward = times.forward.back().total();
    cost.backward_input =
        times.again.back().total() + times.backward_input.back().total();
    cost.backward_weight = times.backward_weight.back().total();
    cost.backward = cost.backward_input + cost.backward_weight;
    times.stages.push_back(cost);
  }
}

/// A stage sends its output, and receives the gradient of it: beside computing,
/// or in its own time.
void add_transfers(
    const StageContext& context, const StageWork& work, StageTimes& times) {
  constexpr size_t kPipeline = index_of(Axis::pp);
  for (size_t stage = 0; stage + 1 < work.size(); ++stage) {
    const double transfer = transfer_seconds(
        context.strategy, context.cluster, context.framework,
        work[stage].back().output_bytes,
        context.rank_of(times.rank_of_stage[stage]),
        context.rank_of(times.rank_of_stage[stage + 1]));
    if (!context.framework.blocking_transfers) {
      times.stages[stage].transfer = transfer;
      continue;
    }
    times.forward[stage].exposed[kPipeline] += transfer;
    times.backward_input[stage + 1].exposed[kPipeline] += transfer;
    times.stages[stage].forward += transfer;
    times.stages[stage + 1].backward_input += transfer;
    times.stages[stage + 1].backward += transfer;
  }
}

/// What each rank does after its last microbatch.
void add_after(
    const StageContext& context, PassTimes& passes, const StageWork& work,
    StageTimes& times) {
  const double tied = tied_seconds(context);
  std::vector<ActivationBytes> kept;
  if (context.strategy.offload_activations) {
    kept =
        stage_activations(context.model, context.strategy, context.framework);
  }
  for (int64_t rank = 0; rank < context.strategy.layout.pp; ++rank) {
    std::vector<Layers> stages;
    StageCost cost{.forward = 0, .backward = 0};
    double kept_bytes = 0;
    for (size_t stage = 0; stage < work.size(); ++stage) {
      if (times.rank_of_stage[stage] != rank) continue;
      stages.push_back(pointers(work[stage]));
      cost.forward += times.stages[stage].forward;
      cost.backward += times.stages[stage].backward;
      if (!kept.empty()) kept_bytes += kept[stage].kept;
    }
    const int64_t place = context.rank_of(rank);
    StageTimes::After after = after_of(context, passes, stages, place);
    if (kept_bytes > 0) {
      after.other += offload_seconds(context, kept_bytes, place, cost);
    }
    if (rank == times.rank_of_stage.front() ||
        rank == times.rank_of_stage.back()) {
      after.tied = tied;
    }
    times.after.push_back(after);
  }
}

}  // namespace

StageTimes stage_times(
    const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster, int64_t first_rank) {
  const Framework framework = framework_on(
      find_framework(strategy.framework), cluster.node_of(first_rank).device);
  const StageContext context{model,      strategy,
                             cluster,    framework,
                             first_rank, strategy.layout.stride(Axis::pp)};
  const StageWork work =
      stage_work(layer_work(model, strategy, framework), strategy);
  StageTimes times;
  times.rank_of_stage = rank_of_stages(strategy);
  PassTimes passes(context);
  add_passes(context, passes, work, times);
  add_transfers(context, work, times);
  add_after(context, passes, work, times);
  return times;
}

}  // namespace echelon::cost
