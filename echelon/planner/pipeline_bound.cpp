// The header proves the bounds. Times are kept as running sums over the layers,
// so that the work of any stage is a difference of two numbers, and layers are
// timed once for all groups that agree in what a layer's time depends on
// (LayerTimes). Pipelines whose ranks have the same sums are bounded once.
#include "echelon/planner/pipeline_bound.h"

#include <algorithm>
#include <limits>
#include <span>

#include "echelon/cost/layer_work.h"
#include "echelon/cost/step_estimate.h"
#include "echelon/cost/strategy.h"

namespace echelon::planner {
namespace {

// Sums in another order differ by less than this.
constexpr double kRounding = 1 - 1e-9;

// The passes through other stages that must precede a rank's first action or
// follow its last.
enum class Around { nothing, forward, both };

Around around_ranks(const cost::Strategy& strategy) {
  if (!splits_backward(strategy.schedule)) return Around::both;
  // Steps of these are measured from a rank's own first action.
  return cost::find_framework(strategy.framework).validates_afterwards
             ? Around::nothing
             : Around::forward;
}

double part(const std::vector<double>& sums, int64_t begin, int64_t count) {
  return sums[static_cast<size_t>(begin + count)] -
         sums[static_cast<size_t>(begin)];
}

// Seconds of recompute in the first layers of a stage.
double recompute_seconds(
    const LayerTimes::Sums& sums, const cost::Strategy& strategy, int64_t begin,
    int64_t count) {
  if (strategy.recompute == cost::Recompute::none) return 0;
  if (strategy.recompute_layers >= 0) {
    count = std::min(count, strategy.recompute_layers);
  }
  return part(
      sums.again[static_cast<size_t>(strategy.recompute)], begin, count);
}

// The longest time over ranks, of their own work and what is around it.
double slowest_rank(
    const std::vector<const LayerTimes::Sums*>& of_rank,
    const cost::Strategy& strategy, const std::vector<int64_t>& counts,
    const std::vector<int32_t>& rank_of_stage, double microbatches) {
  const Around around = around_ranks(strategy);
  const size_t stages = counts.size();
  struct Rank {
    double below = -1;
    double own = 0;
  };
  std::vector<Rank> ranks(of_rank.size());
  double sum_below = 0;
  int64_t begin = 0;
  for (size_t stage = 0; stage < stages; ++stage) {
    const auto rank = static_cast<size_t>(rank_of_stage[stage]);
    const LayerTimes::Sums& sums = *of_rank[rank];
    double forward = part(sums.forward, begin, counts[stage]);
    double both = part(sums.both, begin, counts[stage]) +
                  recompute_seconds(sums, strategy, begin, counts[stage]);
    if (stage == 0) {
      forward += sums.first_forward;
      both += sums.first_both;
    }
    if (stage + 1 == stages) both += sums.last_both;
    ranks[rank].own += both;
    // Stages ascend, so a rank's first one here is its lowest.
    if (ranks[rank].below < 0) ranks[rank].below = sum_below;
    if (around == Around::forward) sum_below += forward;
    if (around == Around::both) sum_below += both;
    begin += counts[stage];
  }
  double most = 0;
  for (const Rank& rank : ranks) {
    most = std::max(most, rank.below + microbatches * rank.own);
  }
  return most;
}

// The least share that a part of the layers has of the total, over the kinds of
// device.
template <class Part>
double least_share(
    const std::vector<const LayerTimes::Sums*>& of_rank, const Part& part) {
  double least = std::numeric_limits<double>::infinity();
  const LayerTimes::Sums* last = nullptr;
  for (const auto* sums : of_rank) {
    // Ranks of one kind share their sums and mostly follow each other.
    if (sums == last) continue;
    last = sums;
    least = std::min(least, part(*sums) / sums->total());
  }
  return least;
}

// The busiest rank's seconds of a microbatch, in the best of all partitions.
double busiest(const std::vector<const LayerTimes::Sums*>& of_rank) {
  double speeds = 0;
  bool alike = true;
  for (const auto* sums : of_rank) {
    speeds += 1 / sums->total();
    alike &= sums == of_rank.front();
  }
  if (alike) return 1 / speeds;
  using Sums = LayerTimes::Sums;
  double work =
      least_share(of_rank, [](const Sums& sums) { return sums.first_both; }) +
      least_share(of_rank, [](const Sums& sums) { return sums.last_both; });
  for (size_t layer = 1; layer < of_rank.front()->both.size(); ++layer) {
    work += least_share(of_rank, [&](const Sums& sums) {
      return sums.both[layer] - sums.both[layer - 1];
    });
  }
  return work / speeds;
}

// The layers between the embedding and the head; of counted models, all.
std::span<const cost::LayerWork> blocks_of(
    const cost::ModelShape& model, const std::vector<cost::LayerWork>& layers) {
  const std::span<const cost::LayerWork> all(layers);
  return model.transformer ? all.subspan(1, all.size() - 2) : all;
}

void append(std::vector<double>& sums, double seconds, int64_t times) {
  for (int64_t i = 0; i < times; ++i) sums.push_back(sums.back() + seconds);
}

}  // namespace

const LayerTimes::Sums& LayerTimes::of(
    const cost::Strategy& group, int64_t samples, int64_t first_rank,
    int64_t rank, int64_t kind) {
  const Layout& layout = group.layout;
  const bool processor = job_.cluster.node_of(first_rank).device.processor;
  // Counted layers accumulate gradients over microbatches.
  const int64_t microbatches =
      job_.model.transformer ? 0 : group.num_microbatches();
  const Key key = {
      layout.tp,
      layout.cp,
      layout.ep,
      group.sequence_parallel,
      samples,
      microbatches,
      kind,
      processor,
      group.context.way,
      group.context.ulysses,
      group.product_chunks};
  const auto [at, is_new] = sums_.try_emplace(key);
  if (is_new) at->second = compute(group, samples, first_rank, rank);
  return at->second;
}

// tp, cp and ep are innermost in every order, so that their groups are placed
// alike on all equal nodes.
LayerTimes::Sums LayerTimes::compute(
    const cost::Strategy& group, int64_t samples, int64_t first_rank,
    int64_t rank) const {
  cost::Strategy own = cost::with_microbatch(group, samples);
  const cost::Framework framework = cost::framework_on(
      cost::find_framework(own.framework),
      job_.cluster.node_of(first_rank).device);
  const auto seconds = [&](const cost::Operations& pass) {
    return cost::pass_seconds(pass, own, job_.cluster, framework, rank).total();
  };
  Sums sums{.forward = {0}, .both = {0}, .again = {}};
  for (const cost::Recompute recompute : cost::kRecomputes) {
    own.recompute = recompute;
    const auto layers = cost::layer_work(job_.model, own, framework);
    const auto blocks = blocks_of(job_.model, layers);
    auto& again = sums.again[static_cast<size_t>(recompute)];
    again = {0};
    for (const cost::LayerWork& layer : blocks) {
      append(again, seconds(layer.again), layer.repeat);
    }
    if (recompute != cost::Recompute::none) continue;
    for (const cost::LayerWork& layer : layers) {
      const double forward = seconds(layer.forward);
      const double both = forward + seconds(layer.backward_input) +
                          seconds(layer.backward_weight);
      if (&layer < blocks.data()) {
        sums.first_forward = forward;
        sums.first_both = both;
      } else if (&layer >= blocks.data() + blocks.size()) {
        sums.last_both = both;
      } else {
        append(sums.forward, forward, layer.repeat);
        append(sums.both, both, layer.repeat);
      }
    }
  }
  return sums;
}

PipelineBound::PipelineBound(
    const SearchJob& job, LayerTimes& times, const cost::Strategy& group)
    : model_(&job.model),
      places_(cost::distinct_pipelines(group, job.cluster)),
      microbatches_(static_cast<double>(group.num_microbatches())) {
  const int64_t stride = group.layout.stride(Axis::pp);
  for (const auto& pipeline : places_) {
    const int64_t samples = cost::microbatch_of(group, pipeline.data_index);
    Ranks ranks;
    int64_t rank = pipeline.first_rank;
    for (const int64_t kind : pipeline.groups) {
      ranks.push_back(
          &times.of(group, samples, pipeline.first_rank, rank, kind));
      rank += stride;
    }
    any_partition_ =
        std::max(any_partition_, kRounding * microbatches_ * busiest(ranks));
    if (std::ranges::find(pipelines_, ranks) == pipelines_.end()) {
      pipelines_.push_back(std::move(ranks));
    }
  }
}

double PipelineBound::of(const cost::Strategy& variant) const {
  if (!model_->transformer) return any_partition_;
  const auto counts = cost::stage_layers(*model_, variant);
  const auto rank_of_stage = cost::rank_of_stages(variant);
  double most = any_partition_;
  for (const Ranks& ranks : pipelines_) {
    most = std::max(
        most,
        kRounding *
            slowest_rank(ranks, variant, counts, rank_of_stage, microbatches_));
  }
  return most;
}

double PipelineTimes::at_least(const cost::Strategy& strategy) const {
  const auto at = seconds_.find(key_of(strategy));
  return at == seconds_.end() ? 0 : at->second;
}

void PipelineTimes::learn(const Candidate& plain) {
  const cost::StepEstimate& step = plain.step;
  const auto exposed = [&](Axis axis) {
    return step.parts.exposed[static_cast<size_t>(axis)];
  };
  seconds_.emplace(
      key_of(plain.strategy), step.step_seconds - exposed(Axis::dp_replicate) -
                                  exposed(Axis::dp_shard) -
                                  step.parts.optimizer - step.parts.other);
}

PipelineTimes::Key PipelineTimes::key_of(const cost::Strategy& strategy) {
  const Layout& layout = strategy.layout;
  return {
      .numbers =
          {layout.data_degree(), layout.tp, layout.pp, layout.cp, layout.ep,
           strategy.microbatch_size, strategy.stages_per_rank,
           static_cast<int64_t>(strategy.context.way),
           strategy.context.ulysses},
      .sequence_parallel = strategy.sequence_parallel,
      .order = layout.order,
      .schedule = strategy.schedule,
      .stage_layers = strategy.stage_layers,
      .rank_microbatch = strategy.rank_microbatch};
}

}  // namespace echelon::planner
