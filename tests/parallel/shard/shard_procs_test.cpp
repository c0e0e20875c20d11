// Sharded parameters with a process per rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "tests/support/places.h"
#include "tests/support/process.h"

namespace echelon {
namespace shard_procs_test {

using testing::HasSubstr;
using testing_support::Command;

std::vector<std::string> command(int ranks, const std::string& test) {
  return {
      test_program("launch_run"),
      "-n",
      std::to_string(ranks),
      "--plain",
      "--",
      test_program("shard_rank"),
      "--gtest_filter=" + test};
}

class Processes : public testing::TestWithParam<std::tuple<std::string, int>> {
};
INSTANTIATE_TEST_SUITE_P(
    Ranks, Processes,
    testing::Combine(testing::Values("local", "gloo"), testing::Values(2, 3)));

TEST_P(Processes, TrainLikeOneDevice) {
  const auto& [backend, size] = GetParam();
  Command run(
      command(size, "Rank.TrainsLikeOneDevice"),
      {"ECHELON_TEST_BACKEND=" + backend});
  EXPECT_EQ(run.wait(), 0) << run.out() << run.err();
  EXPECT_EQ(testing_support::count(run.out(), "[  PASSED  ] 1 test"), size);
}

TEST(Processes, RankThatDiesInAGatherEndsTheJob) {
  Command run(command(3, "Rank.IsKilledInAGather"));
  EXPECT_EQ(run.wait(), 128 + 9);
  EXPECT_THAT(run.err(), HasSubstr("rank 2"));
  EXPECT_TRUE(run.living().empty());
  EXPECT_THAT(run.out() + run.err(), HasSubstr("gather norm"));
}

}  // namespace shard_procs_test
}  // namespace echelon
