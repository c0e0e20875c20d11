// A pass is a rank's layers with the seconds of each. The collectives of
// parameters and gradients are laid beside it by one of three models:
// LeadingCollectives, one layer ahead; TrailingCollectives, behind their layer;
// QueuedCollectives, all at once. A step is longer by what remains exposed, and
// by the share of the hidden part by which collectives slow computation. Equal
// neighbours are one entry with a count, so that a deep model is estimated
// nearly as fast as a shallow one.
#include "echelon/cost/rank_times.h"

#include <algorithm>
#include <cmath>

#include "echelon/cost/memory_estimate.h"

namespace echelon::cost {
const PassSeconds& PassTimes::of(
    const LayerWork& layer, int64_t rank, Operations LayerWork::*pass) {
  static const PassSeconds kNothing;
  if ((layer.*pass).empty()) return kNothing;
  const size_t here = place(rank);
  for (const Entry& entry : entries_) {
    if (entry.kind == layer.kind && entry.pass == pass && entry.place == here) {
      return entry.seconds;
    }
  }
  const PassSeconds seconds = pass_seconds(
      layer.*pass, context_.strategy, context_.cluster, context_.framework,
      rank);
  entries_.push_back({layer.kind, pass, here, seconds});
  return entries_.back().seconds;
}

PassSeconds
PassTimes::of(const Layers& layers, int64_t rank, Operations LayerWork::*pass) {
  PassSeconds sum;
  for (const LayerWork* layer : layers) {
    sum.add(as_double(layer->repeat), of(*layer, rank, pass));
  }
  return sum;
}

size_t PassTimes::place(int64_t rank) {
  // On nodes of one kind all ranks are taken to be placed alike.
  const bool alike_all = !context_.cluster.mixed() && !places_.empty();
  if (rank == last_rank_ || alike_all) return last_place_;
  Place here{.node = &context_.cluster.node_of(rank), .groups = {}};
  size_t number = 0;
  for (const Axis axis : {Axis::tp, Axis::cp, Axis::ep}) {
    here.groups[number++] =
        place_of(context_.strategy, context_.cluster, axis, rank);
  }
  const auto at = std::find(places_.begin(), places_.end(), here);
  last_rank_ = rank;
  last_place_ = static_cast<size_t>(at - places_.begin());
  if (at == places_.end()) places_.push_back(here);
  return last_place_;
}

// Parameters and gradients
// -----------------------------------------------------

namespace {

/// The ranks that share one kind of parameters.
struct Sharers {
  GroupPlace shards;  // ZeRO shards over these
  GroupPlace copies;  // others that sum the gradients
};

/// One rank of a job, and the ranks that it shares its parameters with.
class Sharing {
 public:
  Sharing(const StageContext& context, const Layers& layers, int64_t rank)
      : context(context), rank(rank), dense(sharers(rank, false)) {
    for (const LayerWork* layer : layers) {
      if (layer->expert_parameters <= 0) continue;
      experts = sharers(rank, true);
      return;
    }
  }

  const StageContext& context;
  const int64_t rank;
  Sharers dense, experts;

 private:
  Sharers sharers(int64_t rank, bool of_experts) const {
    const SharingAxes axes =
        sharing_axes(context.strategy, context.framework, of_experts);
    return {
        place_of(context.strategy, context.cluster, axes.shards, rank),
        place_of(context.strategy, context.cluster, axes.copies, rank)};
  }
};

double gradient_seconds(
    const Sharing& sharing, double elements, const Sharers& sharers) {
  const StageContext& context = sharing.context;
  const double bytes =
      elements * reduced_bytes(context.strategy, context.framework);
  if (bytes <= 0) return 0;
  // Replicas of a sharded model reduce in two levels: a reduce-scatter over the
  // shards, then an all-reduce of each shard over its copies.
  return context.seconds_of(
             CollectiveKind::reduce_scatter, bytes, sharers.shards,
             sharing.rank) +
         context.seconds_of(
             CollectiveKind::all_reduce,
             bytes / as_double(sharers.shards.ranks), sharers.copies,
             sharing.rank);
}

double gradient_seconds(const Sharing& rank, const Elements& all) {
  return gradient_seconds(rank, all.dense, rank.dense) +
         gradient_seconds(rank, all.experts, rank.experts);
}

double
gather_seconds(const Sharing& rank, double elements, const Sharers& sharers) {
  if (elements <= 0) return 0;
  return rank.context.seconds_of(
      CollectiveKind::all_gather,
      elements * element_bytes(rank.context.strategy.precision), sharers.shards,
      rank.rank);
}

double gather_seconds(const Sharing& rank, const Elements& all) {
  return gather_seconds(rank, all.dense, rank.dense) +
         gather_seconds(rank, all.experts, rank.experts);
}

/// A collective that is hidden slows the computation that hides it.
Exposed exposed_part(double all, double exposed, const Framework& framework) {
  return {all, exposed + framework.overlap_slowdown * (all - exposed)};
}

struct Step {
  const LayerWork* layer;
  double seconds;
};
/// A rank's layers in the order of a pass, with the seconds of each.
using Pass = std::vector<Step>;

Pass forward_pass(PassTimes& passes, const Layers& layers, int64_t rank) {
  Pass pass;
  for (const LayerWork* layer : layers) {
    pass.push_back(
        {layer, passes.of(*layer, rank, &LayerWork::forward).total()});
  }
  return pass;
}

Pass backward_pass(PassTimes& passes, const Layers& layers, int64_t rank) {
  Pass pass;
  for (auto layer = layers.rbegin(); layer != layers.rend(); ++layer) {
    double seconds = 0;
    for (const auto operations :
         {&LayerWork::again, &LayerWork::backward_input,
          &LayerWork::backward_weight}) {
      seconds += passes.of(**layer, rank, operations).total();
    }
    pass.push_back({*layer, seconds});
  }
  return pass;
}

/// Each layer's parameters are unsharded before it computes; those of the first
/// layer already are when `first_is_there`.
Exposed unsharded(const Sharing& rank, const Pass& pass, bool first_is_there) {
  const Framework& framework = rank.context.framework;
  LeadingCollectives overlap;
  double all = 0;
  for (const auto& [layer, seconds] : pass) {
    double gather = gather_seconds(rank, elements_of(*layer));
    int64_t repeat = layer->repeat;
    if (first_is_there && layer == pass.front().layer) {
      overlap.add(seconds, 0);
      --repeat;
    }
    overlap.add(seconds, gather, repeat);
    all += as_double(repeat) * gather;
  }
  if (!framework.overlaps_parameters) return {all, all};
  return exposed_part(all, overlap.exposed(), framework);
}

/// All all-gathers begin with the pass.
Exposed queued(const Sharing& rank, const Pass& pass) {
  QueuedCollectives overlap(rank.context.framework.overlap_slowdown);
  double all = 0;
  for (const auto& [layer, seconds] : pass) {
    const double gather = gather_seconds(rank, elements_of(*layer));
    overlap.add(seconds, gather, layer->repeat);
    all += as_double(layer->repeat) * gather;
  }
  return {all, overlap.exposed()};
}

/// Gradients are reduced after their layers while the next layer computes,
/// those of small layers together.
class Reductions {
 public:
  explicit Reductions(const Sharing& rank) : rank_(rank) {
    const StageContext& context = rank.context;
    if (context.strategy.zero_stage == 0)
      least_ = context.framework.bucket_bytes;
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
        filling =
            std::min(repeat, static_cast<int64_t>(std::ceil(missing / each)));
      }
      const bool alone = layers_ == 0;  // the bucket has no other layers
      bucket_ += as_double(filling) * own;
      seconds_ += as_double(filling) * seconds;
      layers_ += filling;
      if (filling == repeat && bytes(bucket_) < least_) return;
      // A bucket of equal layers alone is followed by equal buckets, which are
      // sent as one entry with a count.
      const int64_t times = alone ? repeat / filling : 1;
      send(times);
      repeat -= times * filling;
    }
  }

  Exposed take() {
    if (layers_ > 0) send(1);
    return exposed_part(all_, overlap_.exposed(), rank_.context.framework);
  }

 private:
  double bytes(const Elements& all) const {
    return (all.dense + all.experts) *
           reduced_bytes(rank_.context.strategy, rank_.context.framework);
  }

  void send(int64_t times) {
    const double reduce = gradient_seconds(rank_, bucket_);
    overlap_.add(seconds_, reduce, times);
    all_ += as_double(times) * reduce;
    bucket_ = {};
    seconds_ = 0;
    layers_ = 0;
  }

  const Sharing& rank_;
  double least_ = 0;  // bytes of a bucket that is reduced
  TrailingCollectives overlap_;
  double all_ = 0;
  Elements bucket_;  // not reduced yet
  double seconds_ = 0;
  int64_t layers_ = 0;
};

/// `gathers`: all-gathers of parameters use the same links meanwhile.
Exposed reduced(const Sharing& rank, const Pass& pass, bool gathers) {
  Reductions reductions(rank);
  for (const auto& [layer, seconds] : pass) {
    const Elements own = elements_of(*layer);
    const double taken = gathers ? gather_seconds(rank, own) : 0;
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

/// The seconds of collectives that run beside computing: the opposite of
/// exposed_part().
double hidden_seconds(const Exposed& one, const Framework& framework) {
  // With h hidden seconds and slowdown s, exposed = all - h + s h.
  const double slowdown = framework.overlap_slowdown;
  return (one.all - one.exposed) / (1 - slowdown);
}

double seconds_of(const Pass& pass) {
  double seconds = 0;
  for (const auto& [layer, each] : pass) {
    seconds += as_double(layer->repeat) * each;
  }
  return seconds;
}

/// The gradients of a step whose passes are these. Between two backward passes
/// of a rank without a pipeline is a forward. Reductions that may last until
/// the next backward are hidden by it. Where its all-gathers keep the links
/// busy they are not, but they slow the computing that no all-gather slows.
Exposed reduced_often(
    const Sharing& rank, const Pass& forward, const Pass& backward,
    bool gathers) {
  const Strategy& strategy = rank.context.strategy;
  const Framework& framework = rank.context.framework;
  const Exposed last = reduced(rank, backward, gathers);
  if (!gradients_are_reduced_often(strategy, framework)) return last;
  Exposed other = last;
  if (framework.reduces_until_backward && strategy.layout.pp == 1) {
    const double alone = last.all - hidden_seconds(last, framework);
    if (gathers) {
      const double computing =
          seconds_of(forward) + seconds_of(backward) -
          hidden_seconds(unsharded(rank, forward, false), framework) -
          hidden_seconds(unsharded(rank, backward, true), framework);
      other.exposed += framework.overlap_slowdown *
                       std::clamp(alone, 0.0, std::max(0.0, computing));
    } else {
      const double exposed = std::max(0.0, alone - seconds_of(forward));
      other = exposed_part(last.all, exposed, framework);
    }
  }
  return as_double(strategy.num_microbatches() - 1) * other + last;
}

/// One collective, with nothing overlapped.
Exposed in_line(double seconds) {
  return {seconds, seconds};
}

/// ZeRO stage 3 on one pipeline rank: each layer is unsharded before it runs,
/// in forward and backward, and its gradients are reduced after it. Without a
/// pipeline the last layer is still unsharded when its backward begins.
ParameterTimes
sharded(const Sharing& rank, const Pass& forward, const Pass& backward) {
  const StageContext& context = rank.context;
  const Strategy& s = context.strategy;
  const Framework& framework = context.framework;
  const double microbatches = as_double(s.num_microbatches());
  ParameterTimes sum;
  sum.parameters = unsharded(rank, forward, false);
  if (!s.unshard_once) {
    sum.parameters =
        microbatches *
        (sum.parameters + unsharded(rank, backward, s.layout.pp == 1));
  }
  const bool gathers = !s.unshard_once && framework.overlaps_parameters;
  sum.gradients = reduced_often(rank, forward, backward, gathers);
  if (!framework.overlaps_gradients) sum.gradients.exposed = sum.gradients.all;
  return sum;
}

/// Stages 0 to 2: gradients during the last backward, or each (stage 2);
/// parameters after the optimizer, during the first forward. What overlaps is
/// timed layer by layer: a large embedding has the last gradients to be ready,
/// and needs its parameters first.
ParameterTimes replicated(
    const Sharing& sharing, PassTimes& passes, const Layers& layers,
    int64_t rank) {
  const StageContext& context = sharing.context;
  Elements all;
  for (const LayerWork* layer : layers) {
    all += as_double(layer->repeat) * elements_of(*layer);
  }
  ParameterTimes sum;
  const bool often =
      gradients_are_reduced_often(context.strategy, context.framework);
  sum.gradients =
      context.framework.overlaps_gradients
          ? reduced_often(
                sharing, forward_pass(passes, layers, rank),
                backward_pass(passes, layers, rank), false)
          : (often ? as_double(context.strategy.num_microbatches()) : 1) *
                in_line(gradient_seconds(sharing, all));
  if (context.strategy.zero_stage == 0) return sum;
  if (!context.framework.overlaps_parameters) {
    sum.parameters = in_line(gather_seconds(sharing, all));
    return sum;
  }
  const Pass forward = forward_pass(passes, layers, rank);
  sum.parameters = context.framework.gathers_at_once
                       ? queued(sharing, forward)
                       : unsharded(sharing, forward, false);
  return sum;
}

}  // namespace

ParameterTimes parameter_times(
    const StageContext& context, PassTimes& passes, const Layers& layers,
    int64_t rank) {
  const Sharing sharing(context, layers, rank);
  return context.strategy.zero_stage == 3
             ? sharded(
                   sharing, forward_pass(passes, layers, rank),
                   backward_pass(passes, layers, rank))
             : replicated(sharing, passes, layers, rank);
}

double
own_elements(const StageContext& context, const Layers& layers, int64_t rank) {
  const Sharing sharing(context, layers, rank);
  double elements = 0;
  for (const LayerWork* layer : layers) {
    const Elements all = elements_of(*layer);
    elements += as_double(layer->repeat) *
                (all.dense / as_double(sharing.dense.shards.ranks) +
                 all.experts / as_double(sharing.experts.shards.ranks));
  }
  return elements;
}

}  // namespace echelon::cost
