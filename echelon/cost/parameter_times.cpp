#include "echelon/cost/parameter_times.h"

#include <algorithm>
#include <cmath>

#include "echelon/cost/activation_bytes.h"
#include "echelon/cost/overlap.h"
#include "echelon/cost/sharing_axes.h"

namespace echelon {
namespace {

/// Of parameters.
struct Elements {
  double dense = 0;
  double experts = 0;

  Elements& operator+=(const Elements& more) {
    dense += more.dense;
    experts += more.experts;
    return *this;
  }
};
Elements operator*(double factor, const Elements& one) {
  return {factor * one.dense, factor * one.experts};
}

Elements elements_of(const LayerWork& layer) {
  return {layer.parameters - layer.expert_parameters, layer.expert_parameters};
}

/// One kind of parameters of a rank, and who holds copies of them.
struct Weights {
  double elements = 0;
  GroupPlace shards;  // who cuts them: ZeRO
  GroupPlace copies;  // who else sums their gradients
};

Weights weights_of(
    const StageContext& context, double elements, bool experts, int64_t rank) {
  if (elements <= 0) return {};
  const SharingAxes axes =
      sharing_axes(context.strategy, context.stack, experts);
  return {
      elements, place_of(context.strategy, context.cluster, axes.shards, rank),
      place_of(context.strategy, context.cluster, axes.copies, rank)};
}

/// Summing the gradients of `weights`.
double gradient_seconds(const StageContext& context, const Weights& weights, int64_t rank) {
  const Node& node = context.cluster.node_of(rank);
  const double bytes = weights.elements * context.stack.gradient_bytes;
  if (bytes <= 0) return 0;
  const double shards = static_cast<double>(weights.shards.ranks);
  return collective_seconds(
             CollectiveKind::reduce_scatter, bytes, weights.shards, node,
             context.cluster, context.stack) +
      collective_seconds(
             CollectiveKind::all_reduce, bytes / shards, weights.copies, node,
             context.cluster, context.stack);
}

double gradient_seconds(const StageContext& context, const Elements& all, int64_t rank) {
  return gradient_seconds(context, weights_of(context, all.dense, false, rank), rank) +
      gradient_seconds(context, weights_of(context, all.experts, true, rank), rank);
}

double gather_seconds(const StageContext& context, const Weights& weights, int64_t rank) {
  return collective_seconds(
      CollectiveKind::all_gather, weights.elements * element_bytes(context.strategy.precision),
      weights.shards, context.cluster.node_of(rank), context.cluster, context.stack);
}

double gather_seconds(const StageContext& context, const Elements& all, int64_t rank) {
  return gather_seconds(context, weights_of(context, all.dense, false, rank), rank) +
      gather_seconds(context, weights_of(context, all.experts, true, rank), rank);
}

/// What is not exposed slows the computation beside it.
Exposed exposed_part(double all, double exposed, const Stack& stack) {
  return {all, exposed + stack.overlap_slowdown * (all - exposed)};
}

/// A rank's layers in the order of a pass, with what each computes in it.
struct Pass {
  struct Step {
    const LayerWork* layer;
    double seconds;
  };
  std::vector<Step> steps;
};

Pass forward_pass(PassTimes& passes, const Layers& layers, int64_t rank) {
  Pass pass;
  for (const LayerWork* layer : layers) {
    pass.steps.push_back(
        {layer, passes.of(*layer, rank, &LayerWork::forward).total()});
  }
  return pass;
}

Pass backward_pass(PassTimes& passes, const Layers& layers, int64_t rank) {
  Pass pass;
  for (auto layer = layers.rbegin(); layer != layers.rend(); ++layer) {
    double seconds = 0;
    for (const auto operations : {&LayerWork::again, &LayerWork::backward_input,
                                  &LayerWork::backward_weight}) {
      seconds += passes.of(**layer, rank, operations).total();
    }
    pass.steps.push_back({*layer, seconds});
  }
  return pass;
}

/// Each layer's parameters are there before it computes; those of the first layer
/// already, when `first_is_there`.
Exposed gathered(
    const StageContext& context, const Pass& pass, int64_t rank, bool first_is_there) {
  LeadingCollectives beside;
  double all = 0;
  for (const auto& [layer, seconds] : pass.steps) {
    double gather = gather_seconds(context, elements_of(*layer), rank);
    int64_t repeat = layer->repeat;
    if (first_is_there && layer == pass.steps.front().layer) {
      beside.add(seconds, 0);
      --repeat;
    }
    beside.add(seconds, gather, repeat);
    all += static_cast<double>(repeat) * gather;
  }
  if (!context.stack.overlaps_parameters) return {all, all};
  return exposed_part(all, beside.exposed(), context.stack);
}

/// All parameters are on their way when the pass begins.
Exposed queued(const StageContext& context, const Pass& pass, int64_t rank) {
  QueuedCollectives beside(context.stack.overlap_slowdown);
  double all = 0;
  for (const auto& [layer, seconds] : pass.steps) {
    const double gather = gather_seconds(context, elements_of(*layer), rank);
    beside.add(seconds, gather, layer->repeat);
    all += static_cast<double>(layer->repeat) * gather;
  }
  return {all, beside.exposed()};
}

/// Gradients are cut and summed after their layers, beside the next, those of small
/// layers together.
class Reductions {
 public:
  Reductions(const StageContext& context, int64_t rank)
      : context_(context), rank_(rank) {
    if (context.strategy.zero_stage == 0) least_ = context.stack.bucket_bytes;
  }

  /// `repeat` layers, each of which computes for `seconds`.
  void add(const Elements& own, double seconds, int64_t repeat) {
    while (repeat > 0) {
      const double missing = least_ - bytes(bucket_);
      const double each = bytes(own);
      int64_t filling = repeat;
      if (missing <= each) {
        filling = 1;
      } else if (each > 0) {
        filling = std::min(repeat, static_cast<int64_t>(std::ceil(missing / each)));
      }
      const bool alone = layers_ == 0;  // no others among them: as many as there are
      bucket_ += static_cast<double>(filling) * own;
      seconds_ += static_cast<double>(filling) * seconds;
      layers_ += filling;
      if (filling == repeat && bytes(bucket_) < least_) return;
      const int64_t times = alone ? repeat / filling : 1;
      send(times);
      repeat -= times * filling;
    }
  }

  Exposed take() {
    if (layers_ > 0) send(1);
    return exposed_part(all_, beside_.exposed(), context_.stack);
  }

 private:
  double bytes(const Elements& all) const {
    return (all.dense + all.experts) * context_.stack.gradient_bytes;
  }

  void send(int64_t times) {
    const double reduce = gradient_seconds(context_, bucket_, rank_);
    beside_.add(seconds_, reduce, times);
    all_ += static_cast<double>(times) * reduce;
    bucket_ = {};
    seconds_ = 0;
    layers_ = 0;
  }

  const StageContext& context_;
  int64_t rank_;
  double least_ = 0;  // bytes that are sent
  TrailingCollectives beside_;
  double all_ = 0;
  Elements bucket_;  // not sent yet
  double seconds_ = 0;
  int64_t layers_ = 0;
};

/// `gathers`: the layers' parameters are gathered meanwhile, on the same links.
Exposed reduced(
    const StageContext& context, const Pass& pass, int64_t rank, bool gathers) {
  Reductions reductions(context, rank);
  for (const auto& [layer, seconds] : pass.steps) {
    const Elements own = elements_of(*layer);
    const double taken = gathers ? gather_seconds(context, own, rank) : 0;
    reductions.add(own, std::max(0.0, seconds - taken), layer->repeat);
  }
  return reductions.take();
}

Exposed operator*(double factor, const Exposed& one) {
  return {factor * one.all, factor * one.exposed};
}
Exposed operator+(const Exposed& one, const Exposed& other) {
  return {one.all + other.all, one.exposed + other.exposed};
}

/// Of all at once, with nothing beside.
Exposed in_line(double seconds) { return {seconds, seconds}; }

/// ZeRO stage 3 on one pipeline rank: each layer's parameters are gathered before it
/// runs, forwards and backwards, its gradients are cut and summed after it. Without a
/// pipeline the last layer is still there when its backward begins.
ParameterTimes sharded(
    const StageContext& context, PassTimes& passes, const Layers& layers, int64_t rank) {
  const Strategy& s = context.strategy;
  const Stack& stack = context.stack;
  const double microbatches = static_cast<double>(s.num_microbatches());
  const Pass forward = forward_pass(passes, layers, rank);
  const Pass backward = backward_pass(passes, layers, rank);
  ParameterTimes sum;
  sum.parameters = gathered(context, forward, rank, false);
  if (!s.gather_once) {
    sum.parameters = microbatches *
        (sum.parameters + gathered(context, backward, rank, s.layout.pp == 1));
  }
  const double reduces = stack.reduces_each_microbatch ? microbatches : 1;
  const bool gathers = !s.gather_once && stack.overlaps_parameters;
  sum.gradients = reduces * reduced(context, backward, rank, gathers);
  if (!stack.overlaps_gradients) sum.gradients.exposed = sum.gradients.all;
  return sum;
}

/// Stages 0 to 2: gradients once a step, beside the last backward; parameters after
/// the optimizer, beside the first forward. What overlaps goes layer by layer: a large
/// embedding has the last gradients to be ready, and the first parameters to be there.
ParameterTimes once_a_step(
    const StageContext& context, PassTimes& passes, const Layers& layers, int64_t rank) {
  Elements all;
  for (const LayerWork* layer : layers) {
    all += static_cast<double>(layer->repeat) * elements_of(*layer);
  }
  ParameterTimes sum;
  sum.gradients = context.stack.overlaps_gradients
      ? reduced(context, backward_pass(passes, layers, rank), rank, false)
      : in_line(gradient_seconds(context, all, rank));
  if (context.strategy.zero_stage == 0) return sum;
  if (!context.stack.overlaps_parameters) {
    sum.parameters = in_line(gather_seconds(context, all, rank));
    return sum;
  }
  const Pass forward = forward_pass(passes, layers, rank);
  sum.parameters = context.stack.gathers_at_once
      ? queued(context, forward, rank)
      : gathered(context, forward, rank, false);
  return sum;
}

}  // namespace

ParameterTimes parameter_times(
    const StageContext& context, PassTimes& passes, const Layers& layers,
    int64_t rank) {
  return context.strategy.zero_stage == 3
      ? sharded(context, passes, layers, rank)
      : once_a_step(context, passes, layers, rank);
}

double own_elements(
    const StageContext& context, const Layers& layers, int64_t rank) {
  double elements = 0;
  for (const LayerWork* layer : layers) {
    const Elements all = elements_of(*layer);
    const Weights weights = weights_of(context, all.dense, false, rank);
    const Weights experts = weights_of(context, all.experts, true, rank);
    elements += static_cast<double>(layer->repeat) *
        (weights.elements / static_cast<double>(weights.shards.ranks) +
         experts.elements / static_cast<double>(experts.shards.ranks));
  }
  return elements;
}

}  // namespace echelon
