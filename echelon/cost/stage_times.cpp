#include <algorithm>
#include <array>
#include <cmath>

#include "echelon/cost/layer_work.h"
#include "echelon/cost/step_estimate.h"

namespace echelon {
namespace {

double parameter_bytes(const Strategy& strategy) {
  switch (strategy.precision) {
    case Precision::fp64: return 8;
    case Precision::fp32:
    case Precision::tf32: return 4;
    default: return 2;
  }
}

struct Context {
  const ModelShape& model;
  const Strategy& strategy;
  const Cluster& cluster;
  const Stack& stack;
  int64_t first_rank = 0;       // of the pipeline
  int64_t pipeline_stride = 1;  // ranks between neighbours of pp

  int64_t rank_of(int64_t pipeline_rank) const {
    return first_rank + pipeline_rank * pipeline_stride;
  }
};

int64_t stride_of_pipeline(const Strategy& strategy) {
  int64_t stride = 1;
  for (auto axis = strategy.order.rbegin(); axis != strategy.order.rend(); ++axis) {
    if (*axis == Axis::pp) break;
    stride *= strategy.layout.degree(*axis);
  }
  return stride;
}

/// Of a pair of pipeline ranks.
double send_seconds(const Context& context, double bytes, int64_t from, int64_t to) {
  return transfer_seconds(
      context.strategy, context.cluster, context.stack, bytes,
      context.rank_of(from), context.rank_of(to));
}

using Layers = std::vector<const LayerWork*>;

bool alike(const GroupPlace& one, const GroupPlace& other) {
  return one.ranks == other.ranks && one.ranks_per_node == other.ranks_per_node &&
      one.nodes == other.nodes && one.sharing == other.sharing &&
      one.across_racks == other.across_racks;
}

/// Passes through layers, each timed once: what is alike on ranks that are placed
/// alike takes as long.
class PassTimes {
 public:
  explicit PassTimes(const Context& context) : context_(context) {}

  PassSeconds of(
      const LayerWork& layer, int64_t rank, Operations LayerWork::*pass) {
    if ((layer.*pass).empty()) return {};
    const size_t here = place(rank);
    for (const Entry& entry : entries_) {
      if (entry.kind == layer.kind && entry.pass == pass && entry.place == here) {
        return entry.seconds;
      }
    }
    const PassSeconds seconds = pass_seconds(
        layer.*pass, context_.strategy, context_.cluster, context_.stack, rank);
    entries_.push_back({layer.kind, pass, here, seconds});
    return seconds;
  }

  PassSeconds of(
      const Layers& layers, int64_t rank, Operations LayerWork::*pass) {
    PassSeconds sum;
    for (const LayerWork* layer : layers) {
      sum += static_cast<double>(layer->repeat) * of(*layer, rank, pass);
    }
    return sum;
  }

 private:
  struct Place {
    const Node* node = nullptr;
    std::array<GroupPlace, 3> groups;
  };
  struct Entry {
    int64_t kind = 0;
    Operations LayerWork::*pass = nullptr;
    size_t place = 0;
    PassSeconds seconds;
  };

  /// The number of the first place like the rank's.
  size_t place(int64_t rank) {
    if (rank == last_rank_) return last_place_;
    Place here{.node = &context_.cluster.node_of(rank), .groups = {}};
    size_t number = 0;
    for (const Axis axis : {Axis::tp, Axis::cp, Axis::ep}) {
      here.groups[number++] =
          place_of(context_.strategy, context_.cluster, axis, rank);
    }
    const auto same = [&](const Place& other) {
      return other.node == here.node &&
          std::equal(here.groups.begin(), here.groups.end(),
                     other.groups.begin(), alike);
    };
    const auto at = std::find_if(places_.begin(), places_.end(), same);
    last_rank_ = rank;
    last_place_ = static_cast<size_t>(at - places_.begin());
    if (at == places_.end()) places_.push_back(here);
    return last_place_;
  }

  const Context& context_;
  std::vector<Place> places_;
  std::vector<Entry> entries_;
  int64_t last_rank_ = -1;
  size_t last_place_ = 0;
};

/// One kind of parameters of a rank, and who holds copies of them.
struct Weights {
  double elements = 0;
  GroupPlace shards;  // who cuts them: ZeRO
  GroupPlace copies;  // who else sums their gradients
};

Weights dense(const Context& context, double elements, int64_t rank) {
  const Strategy& s = context.strategy;
  if (s.zero_stage == 0) {
    return {elements, {},
            place_of(s, context.cluster,
                     {Axis::dp_replicate, Axis::dp_shard, Axis::cp, Axis::ep}, rank)};
  }
  return {elements,
          place_of(s, context.cluster, {Axis::dp_shard, Axis::cp, Axis::ep}, rank),
          place_of(s, context.cluster, Axis::dp_replicate, rank)};
}

Weights of_experts(const Context& context, double elements, int64_t rank) {
  if (elements <= 0) return {};
  const Strategy& s = context.strategy;
  if (s.zero_stage == 0) {
    return {elements, {},
            place_of(s, context.cluster,
                     {Axis::dp_replicate, Axis::dp_shard, Axis::cp}, rank)};
  }
  return {elements, place_of(s, context.cluster, {Axis::dp_shard, Axis::cp}, rank),
          place_of(s, context.cluster, Axis::dp_replicate, rank)};
}

/// Summing the gradients of `weights`, in buckets.
double gradient_seconds(const Context& context, const Weights& weights, int64_t rank) {
  const Node& node = context.cluster.node_of(rank);
  const double bytes = weights.elements * context.stack.gradient_bytes;
  if (bytes <= 0) return 0;
  const double buckets = context.stack.bucket_bytes > 0
      ? std::max(1.0, std::round(bytes / context.stack.bucket_bytes))
      : 1;
  const double shards = static_cast<double>(weights.shards.ranks);
  return buckets *
      (collective_seconds(
           CollectiveKind::reduce_scatter, bytes / buckets, weights.shards, node,
           context.cluster, context.stack) +
       collective_seconds(
           CollectiveKind::all_reduce, bytes / buckets / shards, weights.copies, node,
           context.cluster, context.stack));
}

double gather_seconds(const Context& context, const Weights& weights, int64_t rank) {
  return collective_seconds(
      CollectiveKind::all_gather, weights.elements * parameter_bytes(context.strategy),
      weights.shards, context.cluster.node_of(rank), context.cluster, context.stack);
}

struct Exposed {
  double all = 0;
  double exposed = 0;
};

/// `communication` beside `computation`: what is left over, and what it slows.
Exposed beside(
    double communication, double computation, bool overlaps, const Stack& stack) {
  if (!overlaps) return {communication, communication};
  const double hidden = std::min(communication, computation);
  return {communication,
          communication - hidden + stack.overlap_slowdown * hidden};
}

/// ZeRO stage 3 on one pipeline rank: each layer's parameters are gathered before it
/// runs, forwards and backwards, its gradients are cut and summed after it.
struct Sharded {
  Exposed gradients, parameters;
};
Sharded sharded(
    const Context& context, PassTimes& passes, const Layers& layers, int64_t rank) {
  const Strategy& s = context.strategy;
  const Stack& stack = context.stack;
  const double microbatches = static_cast<double>(s.num_microbatches());
  Sharded sum;
  double first = 0, last = 0;  // of a pass: nothing runs beside them
  for (const LayerWork* at : layers) {
    const LayerWork& layer = *at;
    const Weights weights =
        dense(context, layer.parameters - layer.expert_parameters, rank);
    const Weights experts = of_experts(context, layer.expert_parameters, rank);
    const double gather = gather_seconds(context, weights, rank) +
        gather_seconds(context, experts, rank);
    const double reduce = gradient_seconds(context, weights, rank) +
        gradient_seconds(context, experts, rank);
    const auto pass = [&](Operations LayerWork::*operations) {
      return passes.of(layer, rank, operations).total();
    };
    const double forward = pass(&LayerWork::forward);
    const double backward = pass(&LayerWork::again) +
        pass(&LayerWork::backward_input) + pass(&LayerWork::backward_weight);
    const double repeat = static_cast<double>(layer.repeat);
    const double gathers = s.gather_once ? 1 : microbatches;
    const double reduces = stack.reduces_each_microbatch ? microbatches : 1;
    const Exposed forwards =
        beside(gather, forward, stack.overlaps_parameters, stack);
    const Exposed again = s.gather_once
        ? Exposed{}
        : beside(gather, backward, stack.overlaps_parameters, stack);
    const Exposed reduced = beside(
        reduce, std::max(0.0, backward - again.all), stack.overlaps_gradients, stack);
    sum.parameters.all += repeat * gathers * (forwards.all + again.all);
    sum.parameters.exposed += repeat * gathers * (forwards.exposed + again.exposed);
    sum.gradients.all += repeat * reduces * reduced.all;
    sum.gradients.exposed += repeat * reduces * reduced.exposed;
    if (first == 0) {
      first = gathers * gather;
      last = reduces * reduce;
    }
  }
  if (stack.overlaps_parameters) sum.parameters.exposed += first;
  if (stack.overlaps_gradients) sum.gradients.exposed += last;
  return sum;
}

/// Stages 0 to 2: gradients once a step, beside the last backward; parameters after
/// the optimizer, beside the first forward.
Sharded once_a_step(
    const Context& context, const Layers& layers, int64_t rank,
    double forward, double backward) {
  const Stack& stack = context.stack;
  double elements = 0, experts = 0, count = 0;
  for (const LayerWork* at : layers) {
    const LayerWork& layer = *at;
    elements += static_cast<double>(layer.repeat) *
        (layer.parameters - layer.expert_parameters);
    experts += static_cast<double>(layer.repeat) * layer.expert_parameters;
    count += static_cast<double>(layer.repeat);
  }
  const Weights weights = dense(context, elements, rank);
  const Weights of_each = of_experts(context, experts, rank);
  const double reduce = gradient_seconds(context, weights, rank) +
      gradient_seconds(context, of_each, rank);
  const double gather = context.strategy.zero_stage == 0
      ? 0
      : gather_seconds(context, weights, rank) + gather_seconds(context, of_each, rank);
  Sharded sum;
  // The first layer's gradients are the last to be ready.
  sum.gradients =
      beside(reduce, backward * (1 - 1 / count), stack.overlaps_gradients, stack);
  sum.parameters =
      beside(gather, forward * (1 - 1 / count), stack.overlaps_parameters, stack);
  return sum;
}

double tied_seconds(const Context& context, const std::vector<LayerWork>& first) {
  const Strategy& s = context.strategy;
  if (!context.model.transformer || !context.model.transformer->tied ||
      s.layout.pp == 1) {
    return 0;
  }
  const double bytes = first.front().parameters * context.stack.gradient_bytes;
  GroupPlace pair;
  pair.ranks = 2;
  const int64_t last = context.rank_of(s.layout.pp - 1);
  const bool near = context.cluster.node_index(context.rank_of(0)) == context.cluster.node_index(last);
  pair.ranks_per_node = near ? 2 : 1;
  pair.nodes = near ? 1 : 2;
  return collective_seconds(
      CollectiveKind::all_reduce, bytes, pair, context.cluster.node_of(context.rank_of(0)),
      context.cluster, context.stack);
}

double optimizer_seconds(const Context& context, double elements, int64_t rank) {
  const Node& node = context.cluster.node_of(rank);
  if (context.strategy.offload_optimizer) {
    // Gradients to the host, parameters back; the update reads and writes masters
    // and two moments in host memory.
    const double host_memory = 20e9;  // of one device's share of the host
    return elements * (context.stack.gradient_bytes +
                       parameter_bytes(context.strategy)) /
        node.host.bytes_per_second + elements * 28 / host_memory;
  }
  return memory_seconds(
      elements * context.stack.optimizer_bytes, node.device, rates_of(node.device));
}

/// Activations to the host and back, beside computation.
double offload_seconds(
    const Context& context, const Layers& layers, int64_t rank,
    double forward, double backward) {
  if (!context.strategy.offload_activations) return 0;
  double bytes = 0;
  for (const LayerWork* at : layers) {
    const LayerWork& layer = *at;
    bytes += static_cast<double>(layer.repeat) * layer.kept_bytes;
  }
  const double copy = bytes / context.cluster.node_of(rank).host.bytes_per_second;
  return static_cast<double>(context.strategy.num_microbatches()) *
      (std::max(0.0, copy - forward) + std::max(0.0, copy - backward));
}

StageTimes::After after_of(
    const Context& context, PassTimes& passes, const Layers& layers, int64_t rank,
    double forward, double backward) {
  StageTimes::After after;
  const Sharded sums = context.strategy.zero_stage == 3
      ? sharded(context, passes, layers, rank)
      : once_a_step(context, layers, rank, forward, backward);
  after.gradients = sums.gradients.all;
  after.gradients_exposed = sums.gradients.exposed;
  after.parameters = sums.parameters.all;
  after.parameters_exposed = sums.parameters.exposed;
  double elements = 0;
  for (const LayerWork* at : layers) {
    const LayerWork& layer = *at;
    const double repeat = static_cast<double>(layer.repeat);
    const Weights weights =
        dense(context, repeat * (layer.parameters - layer.expert_parameters), rank);
    const Weights experts =
        of_experts(context, repeat * layer.expert_parameters, rank);
    elements += weights.elements / static_cast<double>(weights.shards.ranks) +
        experts.elements / static_cast<double>(experts.shards.ranks);
  }
  after.optimizer = optimizer_seconds(context, elements, rank);
  after.other = context.stack.step_host_seconds +
      offload_seconds(context, layers, rank, forward, backward);
  return after;
}

}  // namespace

StageTimes stage_times(
    const ModelShape& model, const Strategy& strategy, const Cluster& cluster,
    int64_t first_rank) {
  const Stack& stack = find_stack(strategy.stack);
  const Context context{
      model, strategy, cluster, stack, first_rank, stride_of_pipeline(strategy)};
  const auto work =
      stage_work(layer_work(model, strategy, stack), strategy, stack);
  StageTimes times;
  times.rank_of_stage = rank_of_stages(strategy);
  PassTimes passes(context);
  for (size_t stage = 0; stage < work.size(); ++stage) {
    const int64_t rank = context.rank_of(times.rank_of_stage[stage]);
    Layers layers;
    for (const LayerWork& layer : work[stage]) layers.push_back(&layer);
    times.forward.push_back(passes.of(layers, rank, &LayerWork::forward));
    times.again.push_back(passes.of(layers, rank, &LayerWork::again));
    times.backward_input.push_back(passes.of(layers, rank, &LayerWork::backward_input));
    times.backward_weight.push_back(passes.of(layers, rank, &LayerWork::backward_weight));
    StageCost cost;
    cost.forward = times.forward.back().total();
    cost.backward_input =
        times.again.back().total() + times.backward_input.back().total();
    cost.backward_weight = times.backward_weight.back().total();
    cost.backward = cost.backward_input + cost.backward_weight;
    times.stages.push_back(cost);
  }
  for (size_t stage = 0; stage + 1 < work.size(); ++stage) {
    times.stages[stage].transfer = send_seconds(
        context, work[stage].back().output_bytes, times.rank_of_stage[stage],
        times.rank_of_stage[stage + 1]);
  }
  if (stack.blocking_transfers) {
    // A stage sends its output, and receives the gradient of it, in its own time.
    for (size_t stage = 0; stage + 1 < work.size(); ++stage) {
      StageCost& cost = times.stages[stage];
      const size_t axis = 2;  // pp in kAxes
      times.forward[stage].exposed[axis] += cost.transfer;
      times.backward_input[stage + 1].exposed[axis] += cost.transfer;
      cost.forward += cost.transfer;
      times.stages[stage + 1].backward_input += cost.transfer;
      times.stages[stage + 1].backward += cost.transfer;
      cost.transfer = 0;
    }
  }
  const double tied = tied_seconds(context, work.front());
  for (int64_t rank = 0; rank < strategy.layout.pp; ++rank) {
    Layers layers;
    double forward = 0, backward = 0;
    for (size_t stage = 0; stage < work.size(); ++stage) {
      if (times.rank_of_stage[stage] != rank) continue;
      for (const LayerWork& layer : work[stage]) layers.push_back(&layer);
      forward += times.stages[stage].forward;
      backward += times.stages[stage].backward;
    }
    times.after.push_back(after_of(
        context, passes, layers, context.rank_of(rank), forward, backward));
    if (rank == times.rank_of_stage.front() || rank == times.rank_of_stage.back()) {
      times.after.back().other += tied;
    }
  }
  return times;
}

}  // namespace echelon
