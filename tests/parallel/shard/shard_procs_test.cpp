// Sharded parameters with a process per rank.
#include <gmock/gmock.h>

#include <string>
#include <tuple>

#include "tests/support/process_ranks.h"

namespace echelon::shard_procs_test {

using namespace testing_support;

class Processes : public testing::TestWithParam<std::tuple<std::string, int>> {
};
INSTANTIATE_TEST_SUITE_P(
    Ranks, Processes,
    testing::Combine(testing::Values("local", "gloo"), testing::Values(2, 3)));

TEST_P(Processes, TrainLikeOneDevice) {
  const auto& [backend, size] = GetParam();
  expect_ranks_pass(
      "shard_rank", size, "Rank.TrainsLikeOneDevice",
      {"ECHELON_TEST_BACKEND=" + backend});
}

TEST(Processes, RankThatDiesInAGatherEndsTheJob) {
  EXPECT_THAT(
      expect_killed_rank_ends_job("shard_rank", "Rank.IsKilledInAGather", 2),
      testing::HasSubstr("gather norm"));
}

}  // namespace echelon::shard_procs_test
