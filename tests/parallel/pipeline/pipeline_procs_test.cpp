// Pipelines with a process per rank.
#include <gtest/gtest.h>

#include "tests/support/process_ranks.h"

namespace echelon::pipeline_procs_test {

using namespace testing_support;

TEST(PipelineProcesses, TrainLikeOneDevice) {
  expect_ranks_pass("pipeline_rank", 2, "Rank.TrainsLikeOneDevice");
  expect_ranks_pass("pipeline_rank", 3, "Rank.TrainsLikeOneDevice");
}

TEST(PipelineProcesses, TrainLikeOneDeviceOverGloo) {
  expect_ranks_pass("pipeline_rank", 2, "Rank.TrainsLikeOneDeviceOverGloo");
}

TEST(PipelineProcesses, StageThatDiesMidStepIsNamed) {
  expect_killed_rank_ends_job("pipeline_rank", "Rank.IsKilledMidStep", 1);
}

}  // namespace echelon::pipeline_procs_test
