#include "echelon/pool/history.h"

#include <gmock/gmock.h>

namespace echelon::pool::history_test {

using testing::ElementsAre;
using testing::Pair;

// 4 devices from second 100 to 200: vision has 1 of research's 2.
PoolUse some_use(const std::vector<Allocation>& allocations) {
  const std::vector<Project> projects = {
      {.name = "language", .guaranteed = 1},
      {.name = "research", .guaranteed = 2},
      {.name = "vision", .parent = 1, .guaranteed = 1}};
  return use_of(allocations, projects, 4, 100, 200);
}

Allocation allocation(
    const std::string& project, int64_t devices, double began, double ended) {
  return {
      .job = 1,
      .project = project,
      .devices = devices,
      .began = began,
      .ended = ended};
}

TEST(PoolHistory, CountsWhatWasUsedAndBorrowed) {
  const PoolUse use = some_use(
      {allocation("language", 3, 50, 120),  // began before
       allocation("language", 1, 120, 140),
       allocation("vision", 2, 150, 0),  // has not ended
       allocation("vision", 1, 160, 170)});
  ASSERT_EQ(use.projects.size(), 3u);
  const auto& [language, research, vision] =
      std::tie(use.projects[0], use.projects[1], use.projects[2]);
  EXPECT_EQ(language.device_seconds, 3 * 20 + 20);
  EXPECT_EQ(language.borrowed_seconds, 2 * 20);
  EXPECT_THAT(
      language.steps, ElementsAre(Pair(100, 3), Pair(120, 1), Pair(140, 0)));
  EXPECT_EQ(vision.device_seconds, 2 * 50 + 10);
  EXPECT_EQ(vision.borrowed_seconds, 50 + 10);
  // The last moment has what goes on after it.
  EXPECT_THAT(
      vision.steps, ElementsAre(
                        Pair(100, 0), Pair(150, 2), Pair(160, 3), Pair(170, 2),
                        Pair(200, 0)));
  // A parent has what its projects have, and counts once.
  EXPECT_TRUE(research.is_parent);
  EXPECT_EQ(research.steps, vision.steps);
  EXPECT_EQ(research.borrowed_seconds, 10);
  EXPECT_EQ(use.used_seconds, 80 + 110);
  EXPECT_EQ(use.idle_seconds, 400 - 190);
}

TEST(PoolHistory, AProjectThatLeftTheFileIsThere) {
  const PoolUse use = some_use({allocation("speech", 2, 90, 110)});
  ASSERT_EQ(use.projects.size(), 4u);
  EXPECT_EQ(use.projects[3].name, "speech");
  EXPECT_EQ(use.projects[3].device_seconds, 20);
  EXPECT_EQ(use.projects[3].borrowed_seconds, 20);
}

TEST(PoolHistory, WithoutAPastAllIsIdle) {
  const PoolUse use = some_use({});
  EXPECT_EQ(use.idle_seconds, 400);
  EXPECT_THAT(use.projects[0].steps, ElementsAre(Pair(100, 0)));
}

}  // namespace echelon::pool::history_test
