// Which strategies share the time of a pipeline.
#include "echelon/planner/pipeline_bound.h"

#include <gtest/gtest.h>

namespace echelon::planner::pipeline_times_test {

cost::Strategy strategy_of_eight() {
  return {
      .layout = {.dp_replicate = 2, .tp = 2, .pp = 2},
      .global_batch = 16,
      .microbatch_size = 2};
}

TEST(PipelineTimes, AreStepsWithoutWhatDataParallelRanksDoAlone) {
  Candidate plain{strategy_of_eight(), {}};
  cost::StepEstimate& step = plain.step;
  step.step_seconds = 10;
  step.parts.optimizer = 1;
  step.parts.other = 0.5;
  step.parts.exposed[static_cast<size_t>(Axis::dp_replicate)] = 2;
  step.parts.exposed[static_cast<size_t>(Axis::dp_shard)] = 0.25;
  step.parts.exposed[static_cast<size_t>(Axis::tp)] = 3;
  PipelineTimes times;
  EXPECT_EQ(times.at_least(plain.strategy), 0);
  times.learn(plain);
  EXPECT_DOUBLE_EQ(times.at_least(plain.strategy), 6.25);

  cost::Strategy sharded = plain.strategy;
  sharded.layout.dp_replicate = 1;
  sharded.layout.dp_shard = 2;
  sharded.zero_stage = 3;
  EXPECT_DOUBLE_EQ(times.at_least(sharded), 6.25);
}

TEST(PipelineTimes, AreSharedByStrategiesWithOnePipelineAlone) {
  PipelineTimes times;
  Candidate plain{strategy_of_eight(), {}};
  plain.step.step_seconds = 10;
  times.learn(plain);
  const std::vector<void (*)(cost::Strategy&)> changes = {
      [](cost::Strategy& s) { s.layout.dp_replicate = 4; },
      [](cost::Strategy& s) { s.layout.tp = 4; },
      [](cost::Strategy& s) { s.layout.pp = 4; },
      [](cost::Strategy& s) { s.layout.cp = 2; },
      [](cost::Strategy& s) { s.layout.ep = 2; },
      [](cost::Strategy& s) { s.microbatch_size = 1; },
      [](cost::Strategy& s) { s.stages_per_rank = 2; },
      [](cost::Strategy& s) { s.sequence_parallel = true; },
      [](cost::Strategy& s) {
        std::swap(s.layout.order[0], s.layout.order[2]);
      },
      [](cost::Strategy& s) { s.schedule = ScheduleKind::gpipe; },
      [](cost::Strategy& s) {
        s.stage_layers = {3, 5};
      },
      [](cost::Strategy& s) {
        s.rank_microbatch = {1, 2};
      }};
  for (size_t i = 0; i < changes.size(); ++i) {
    cost::Strategy other = plain.strategy;
    changes[i](other);
    EXPECT_EQ(times.at_least(other), 0) << "change " << i;
  }
}

}  // namespace echelon::planner::pipeline_times_test
