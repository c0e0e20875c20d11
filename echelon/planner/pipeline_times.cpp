#include "echelon/planner/pipeline_times.h"

namespace echelon {

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
      key_of(plain.strategy), step.step_seconds - exposed(Axis::dp_replicate) -
                                  exposed(Axis::dp_shard) -
                                  step.parts.optimizer - step.parts.other);
}

PipelineTimes::Key PipelineTimes::key_of(const Strategy& strategy) {
  const Layout& layout = strategy.layout;
  return {
      .numbers =
          {layout.data_degree(), layout.tp, layout.pp, layout.cp, layout.ep,
           strategy.microbatch_size, strategy.stages_per_rank},
      .sequence_parallel = strategy.sequence_parallel,
      .order = layout.order,
      .schedule = strategy.schedule,
      .stage_layers = strategy.stage_layers,
      .rank_microbatch = strategy.rank_microbatch};
}

}  // namespace echelon
