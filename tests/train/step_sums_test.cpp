#include "echelon/train/step_sums.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace echelon::step_sums_test {

std::vector<StepSums> shared(const std::vector<StepShare>& ranks) {
  std::vector<StepSums> all(ranks.size());
  run_ranks(static_cast<int>(ranks.size()), [&](World& world) {
    const auto rank = static_cast<size_t>(world.rank());
    all[rank] = share_sums(ranks[rank], world);
  });
  return all;
}

TEST(StepSums, EachNumberComesBackUnchanged) {
  const auto all = shared(
      {{.score = {.loss_sum = 1, .count = 10, .samples = 100},
        .skipped = 1000,
        .work_seconds = 1,
        .saver = {.ready = 1}},
       {.score = {.loss_sum = 2, .count = 20, .samples = 200},
        .skipped = 2000,
        .work_seconds = 4,
        .stop = true,
        .saver = {.failed = 1, .request = 1}},
       {.score = {.loss_sum = 4, .count = 40, .samples = 400},
        .skipped = 4000,
        .work_seconds = 1,
        .saver = {.ready = 1, .request = 1}}});
  for (const auto& sums : all) {
    EXPECT_EQ(sums.loss_sum, 7);
    EXPECT_EQ(sums.count, 70);
    EXPECT_EQ(sums.samples, 700);
    EXPECT_EQ(sums.skipped, 7000);
    EXPECT_TRUE(sums.stop);
    EXPECT_FALSE(sums.preempted);
    EXPECT_EQ(sums.saver.ready, 2);
    EXPECT_EQ(sums.saver.failed, 1);
    EXPECT_EQ(sums.saver.request, 2);
    EXPECT_EQ(sums.bad_rank, -1);
    EXPECT_EQ(sums.slowest_rank, 1);
    EXPECT_EQ(sums.slowest_excess, 1);
  }
}

TEST(StepSums, OneRankThatIsTerminatedStopsAll) {
  for (const auto& sums : shared(
           {{}, {.stop = true, .terminated = true}, {.terminated = false}})) {
    EXPECT_TRUE(sums.stop);
    EXPECT_TRUE(sums.preempted);
  }
}

TEST(StepSums, TheFirstRankWithANanLossIsNamed) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  for (const auto& sums : shared(
           {{.score = {.loss_sum = 3}},
            {.score = {.loss_sum = kNan}},
            {.score = {.loss_sum = INFINITY}}})) {
    EXPECT_EQ(sums.bad_rank, 1);
    EXPECT_EQ(sums.loss_sum, 3);
  }
}

TEST(StepSums, OneRankIsNotTheSlowest) {
  const auto sums = shared({{.work_seconds = 2}});
  EXPECT_EQ(sums[0].slowest_rank, -1);
  EXPECT_EQ(sums[0].slowest_excess, 0);
}

}  // namespace echelon::step_sums_test
