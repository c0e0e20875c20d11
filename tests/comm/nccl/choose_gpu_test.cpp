#include "echelon/comm/nccl/choose_gpu.h"

#include <gmock/gmock.h>

#include <cstdlib>

#include "echelon/comm/world.h"
#include "echelon/error.h"
#include "tests/support/error_text.h"
#include "tests/support/process_ranks.h"

namespace echelon::choose_gpu_test {

using testing::HasSubstr;

RankGpus
sees(int rank, std::vector<std::string> gpus, int node = 0, int local = -1) {
  return {
      .rank = rank,
      .node = node,
      .local_rank = local < 0 ? rank : local,
      .gpus = std::move(gpus)};
}

std::optional<int> index_of(const std::vector<RankGpus>& all, int rank) {
  return choose_gpu(all, rank, /*needed=*/true).index;
}

TEST(ChooseGpu, LocalRanksTakeTheirOwnOfACommonList) {
  const std::vector<RankGpus> all = {
      sees(0, {"a", "b"}), sees(1, {"a", "b"}), sees(2, {"a", "b"}, 1, 0),
      sees(3, {"a", "b"}, 1, 1)};
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(index_of(all, rank), rank % 2);
  }
  EXPECT_EQ(choose_gpu(all, 0, false).note, "");
}

TEST(ChooseGpu, OneVisibleGpuForEachTaskIsThatTasks) {
  const std::vector<RankGpus> all = {
      sees(0, {"a"}), sees(1, {"b"}), sees(2, {"c"}), sees(3, {"d"})};
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(index_of(all, rank), 0);
  EXPECT_EQ(index_of({sees(0, {"a", "b"}), sees(1, {"b", "a"})}, 1), 0);
}

TEST(ChooseGpu, FewerGpusThanRanksAreSaidAndRefusedWhereNeeded) {
  const std::vector<RankGpus> all = {sees(0, {"a"}), sees(1, {"a"})};
  const auto choice = choose_gpu(all, 0, /*needed=*/false);
  EXPECT_FALSE(choice.index);
  EXPECT_THAT(choice.note, HasSubstr("2 rank(s) and 1 GPU(s)"));
  EXPECT_THROW(choose_gpu(all, 0, /*needed=*/true), ConfigError);
  // One host's lack holds for the job.
  EXPECT_FALSE(choose_gpu({sees(0, {"a"}), sees(1, {}, 1, 0)}, 0, false).index);
}

TEST(ChooseGpu, MoreGpusThanRanksAreSaid) {
  const auto choice =
      choose_gpu({sees(0, {"a", "b", "c"}), sees(1, {"a", "b", "c"})}, 1, true);
  EXPECT_EQ(choice.index, 1);
  EXPECT_THAT(choice.note, HasSubstr("1 GPU(s) are not used"));
}

TEST(ChooseGpu, NoGpuAnywhereIsTheCpu) {
  const std::vector<RankGpus> all = {sees(0, {}), sees(1, {})};
  EXPECT_FALSE(choose_gpu(all, 0, /*needed=*/false).index);
  EXPECT_EQ(choose_gpu(all, 0, /*needed=*/false).note, "");
  EXPECT_THROW(choose_gpu(all, 0, /*needed=*/true), ConfigError);
}

TEST(ChooseGpu, AGpuThatCannotBeUsedIsAnErrorOnAllRanks) {
  std::vector<RankGpus> all = {sees(0, {"a"}), sees(1, {})};
  all[1].problem = "its driver is asleep";
  for (int rank = 0; rank < 2; ++rank) {
    const auto message = error_text<ConfigError>(
        [&] { choose_gpu(all, rank, /*needed=*/false); });
    EXPECT_THAT(message, HasSubstr("rank 1"));
    EXPECT_THAT(message, HasSubstr("its driver is asleep"));
  }
}

TEST(ChooseGpu, WhatARankSeesTravelsAsText) {
  RankGpus one = sees(3, {"a", "b"}, 2, 1);
  one.problem = "none, really";
  const RankGpus other = rank_gpus_from_text(to_text(one));
  EXPECT_EQ(other.rank, 3);
  EXPECT_EQ(other.node, 2);
  EXPECT_EQ(other.local_rank, 1);
  EXPECT_EQ(other.gpus, one.gpus);
  EXPECT_EQ(other.problem, one.problem);
  EXPECT_TRUE(rank_gpus_from_text(to_text(sees(0, {}))).gpus.empty());
}

// --------------------------------------------- a driver in place of the real

/// Run by the tests below, in a process that finds the fake driver.
TEST(WithFakeDriver, TheWorldIsRefused) {
  if (!testing_support::is_rank())
    GTEST_SKIP() << testing_support::kRunByOthers;
  const auto message =
      error_text<ConfigError>([] { World::from_environment(); });
  EXPECT_THAT(message, HasSubstr(std::getenv("ECHELON_TEST_REASON")));
  // The CPU remains, for those who ask for it.
  const World world = World::from_environment({.device = DeviceKind::cpu});
  EXPECT_TRUE(world.device().is_cpu());
}

void expect_refused(
    const std::string& reason, std::vector<std::string> environment) {
  const auto self = std::filesystem::read_symlink("/proc/self/exe");
  environment.push_back("LD_LIBRARY_PATH=" + test_program("fake_cuda"));
  environment.push_back("ECHELON_TEST_RANK=1");
  environment.push_back("ECHELON_TEST_REASON=" + reason);
  testing_support::Command child(
      {self.string(), "--gtest_filter=WithFakeDriver.*"}, environment);
  EXPECT_EQ(child.wait(), 0) << child.out() << child.err();
  EXPECT_EQ(testing_support::count(child.out(), "[  PASSED  ] 1 test."), 1)
      << child.out();
}

TEST(FakeDriver, ThatDoesNotStartIsAnErrorWithItsReason) {
  expect_refused("CUDA_ERROR_SYSTEM_NOT_READY", {"FAKE_CUDA_INIT=802"});
}

TEST(FakeDriver, ThatIsTooOldIsAnErrorWithBothVersions) {
  expect_refused(
      "runs CUDA 12.8, and LibTorch needs 13.0", {"FAKE_CUDA_VERSION=12080"});
}

TEST(FakeDriver, OfAWorkingGpuIsAnErrorWhereTheLibrariesAreNot) {
  expect_refused("cannot load libechelon_nccl.so", {});
}

}  // namespace echelon::choose_gpu_test
