#include "echelon/environment/launch_environment.h"

#include <gtest/gtest.h>

#include <map>

namespace echelon::launch {
namespace launch_environment_test {

std::map<std::string, std::string>
as_map(const std::vector<std::string>& entries) {
  std::map<std::string, std::string> result;
  for (const auto& entry : entries) {
    const size_t equals = entry.find('=');
    EXPECT_TRUE(
        result.emplace(entry.substr(0, equals), entry.substr(equals + 1))
            .second)
        << entry;
  }
  return result;
}

TEST(RankEnvironment, UsesTorchrunsNames) {
  const RankPlace place{
      .rank = 5,
      .local_rank = 1,
      .world_size = 8,
      .local_world_size = 4,
      .node_rank = 1,
      .num_nodes = 2};
  const JobPlace job{
      .job = "abc",
      .generation = 3,
      .master_addr = "10.0.0.1",
      .master_port = 29500,
      .node_address = "10.0.0.2"};
  const auto env = as_map(rank_environment(
      {"HOME=/h", "RANK=9"}, place, job, {"/e.json", -1}, {}, 8));
  const std::map<std::string, std::string> expected = {
      {"HOME", "/h"},
      {"RANK", "5"},
      {"LOCAL_RANK", "1"},
      {"WORLD_SIZE", "8"},
      {"LOCAL_WORLD_SIZE", "4"},
      {"GROUP_RANK", "1"},
      {"GROUP_WORLD_SIZE", "2"},
      {"ROLE_RANK", "5"},
      {"ROLE_WORLD_SIZE", "8"},
      {"ROLE_NAME", "default"},
      {"MASTER_ADDR", "10.0.0.1"},
      {"MASTER_PORT", "29500"},
      {"TORCHELASTIC_RUN_ID", "abc"},
      {"TORCHELASTIC_RESTART_COUNT", "3"},
      {"TORCHELASTIC_MAX_RESTARTS", "0"},
      {"TORCHELASTIC_USE_AGENT_STORE", "False"},
      {"OMP_NUM_THREADS", "2"},
      {"ECHELON_JOB", "abc"},
      {"ECHELON_GENERATION", "3"},
      {"ECHELON_ERROR_FILE", "/e.json"},
      {"ECHELON_NODE_ADDRESS", "10.0.0.2"}};
  EXPECT_EQ(env, expected);
}

TEST(RankEnvironment, ThreadsAreAtLeastOneUnlessTheUserSetsThem) {
  const RankPlace four{.world_size = 4, .local_world_size = 4};
  EXPECT_EQ(
      as_map(rank_environment({}, four, {}, {}, {}, 2))["OMP_NUM_THREADS"],
      "1");
  EXPECT_EQ(
      as_map(rank_environment(
          {"OMP_NUM_THREADS=7"}, four, {}, {}, {}, 2))["OMP_NUM_THREADS"],
      "7");
}

TEST(RankEnvironment, AnOuterJobsFilesAreRemoved) {
  const auto env = as_map(rank_environment(
      {"ECHELON_MASTER_FD=3", "ECHELON_ERROR_FILE=/old",
       "ECHELON_NODE_ADDRESS=1.2.3.4"},
      {}, {}, {}, {}, 1));
  EXPECT_FALSE(env.contains("ECHELON_MASTER_FD"));
  EXPECT_FALSE(env.contains("ECHELON_ERROR_FILE"));
  EXPECT_FALSE(env.contains("ECHELON_NODE_ADDRESS"));
}

TEST(RankEnvironment, ExtraVariablesWin) {
  EXPECT_EQ(
      as_map(rank_environment(
          {}, {}, {}, {"", 7}, {{"ECHELON_MASTER_FD", "8"}},
          1))["ECHELON_MASTER_FD"],
      "8");
}

TEST(RandomJobId, Differs) {
  EXPECT_EQ(random_job_id().size(), 16u);
  EXPECT_NE(random_job_id(), random_job_id());
}

}  // namespace launch_environment_test
}  // namespace echelon::launch
