// Pipelines with a process per rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/support/places.h"
#include "tests/support/process.h"

namespace echelon {
namespace pipeline_procs_test {

using testing::AllOf;
using testing::HasSubstr;
using testing_support::Command;

std::vector<std::string> command(int ranks, const std::string& test) {
  return {
      test_program("launch_run"),
      "-n",
      std::to_string(ranks),
      "--plain",
      "--",
      test_program("pipeline_rank"),
      "--gtest_filter=" + test};
}

void expect_passes(int ranks, const std::string& test) {
  Command run(command(ranks, test));
  EXPECT_EQ(run.wait(), 0) << run.out() << run.err();
  EXPECT_EQ(testing_support::count(run.out(), "[  PASSED  ] 1 test"), ranks);
}

TEST(PipelineProcesses, TrainLikeOneDevice) {
  expect_passes(2, "Rank.TrainsLikeOneDevice");
  expect_passes(3, "Rank.TrainsLikeOneDevice");
}

TEST(PipelineProcesses, TrainLikeOneDeviceOverGloo) {
  expect_passes(2, "Rank.TrainsLikeOneDeviceOverGloo");
}

TEST(PipelineProcesses, StageThatDiesMidStepIsNamed) {
  Command run(command(3, "Rank.IsKilledMidStep"));
  EXPECT_EQ(run.wait(), 128 + 9);
  EXPECT_THAT(run.err(), HasSubstr("rank 1"));
  EXPECT_TRUE(run.living().empty());
}

}  // namespace pipeline_procs_test
}  // namespace echelon
