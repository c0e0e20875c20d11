#include "echelon/planner/time_bounds.h"

#include <algorithm>
#include <limits>

#include "echelon/schedule/options.h"

namespace echelon {
namespace {

constexpr double kEvenStages = 0.9;

// Of the (pp - 1) microbatches that 1F1B waits for, the part that remains.
double bubble_share(const std::string& schedule, int64_t stages_per_rank) {
  if (schedule == "gpipe" || schedule == "1f1b") return 1;
  if (schedule == "interleaved" || schedule == "breadth_first") {
    const double stages = static_cast<double>(
        stages_per_rank > 0 ? stages_per_rank : stages_per_rank_of(schedule));
    return 1 / stages;
  }
  return 0;
}

}  // namespace

double lower_bound_seconds(const Strategy& strategy, double microbatch_seconds) {
  const double pp = static_cast<double>(strategy.layout.pp);
  const double waits =
      strategy.layout.pp == 1
          ? 0
          : kEvenStages * (pp - 1) *
                bubble_share(strategy.schedule, strategy.stages_per_rank);
  const double microbatches = static_cast<double>(strategy.num_microbatches());
  return (microbatches + waits) * microbatch_seconds / pp;
}

MicrobatchTimes::MicrobatchTimes(const SearchJob& job) : job_(job) {
  for (const auto& group : job.cluster.groups) {
    Cluster equal = job.cluster;
    equal.groups = {group};
    equal.groups[0].count =
        (job.devices + group.node.num_devices - 1) / group.node.num_devices;
    equals_.push_back(equal);
  }
}

double MicrobatchTimes::of(const Strategy& group) {
  const auto& layout = group.layout;
  const Key key = {layout.tp, layout.cp, layout.ep, group.sequence_parallel,
                   group.microbatch_size};
  const auto [at, is_new] = times_.try_emplace(key, 0.0);
  if (is_new) at->second = compute(group);
  return at->second;
}

// With nothing but the work of the microbatch.
double MicrobatchTimes::compute(const Strategy& group) const {
  Strategy alone = group;
  alone.order = kAxes;
  alone.layout.dp_replicate = group.layout.data_degree() * group.layout.pp;
  alone.layout.dp_shard = 1;
  alone.layout.pp = 1;
  alone.zero_stage = 0;
  alone.stages_per_rank = 0;
  alone.schedule = "1f1b";
  alone.stage_layers.clear();
  alone.rank_microbatch.clear();
  alone.global_batch = alone.data_ranks() * alone.microbatch_size;
  double least = std::numeric_limits<double>::infinity();
  for (const auto& cluster : equals_) {
    const auto times = stage_times(job_.model, alone, cluster);
    double seconds = 0;
    for (const auto& stage : times.stages) {
      seconds += stage.forward + stage.backward;
    }
    least = std::min(least, seconds);
  }
  return least;
}

double PipelineTimes::at_least(const Strategy& strategy) const {
  const auto at = seconds_.find(key_of(strategy));
  return at == seconds_.end() ? 0 : at->second;
}

void PipelineTimes::learn(const Candidate& plain) {
  const StepEstimate& step = plain.step;
  const auto exposed = [&](Axis axis) {
    return step.parts.exposed[static_cast<size_t>(axis)];
  };
  seconds_.emplace(
      key_of(plain.strategy),
      step.step_seconds - exposed(Axis::dp_replicate) - exposed(Axis::dp_shard) -
          step.parts.optimizer - step.parts.other);
}

PipelineTimes::Key PipelineTimes::key_of(const Strategy& strategy) {
  const Layout& layout = strategy.layout;
  return {
      .numbers = {layout.data_degree(), layout.tp, layout.pp, layout.cp, layout.ep,
                  strategy.microbatch_size, strategy.stages_per_rank},
      .sequence_parallel = strategy.sequence_parallel,
      .order = strategy.order,
      .schedule = strategy.schedule,
      .stage_layers = strategy.stage_layers,
      .rank_microbatch = strategy.rank_microbatch};
}

}  // namespace echelon
