#include "echelon/train/step_sums.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace echelon::step_sums_test {

Score score(double loss_sum, int64_t count = 1, int64_t samples = 1) {
  return {
      .losses = {torch::tensor(loss_sum, torch::kFloat64)},
      .count = count,
      .samples = samples};
}

std::vector<StepSums> shared(const std::vector<StepShare>& ranks) {
  std::vector<StepSums> all(ranks.size());
  run_ranks(static_cast<int>(ranks.size()), [&](World& world) {
    const auto rank = static_cast<size_t>(world.rank());
    all[rank] = read_sums(sum_over_ranks(ranks[rank], world), world.size());
  });
  return all;
}

TEST(StepSums, EachNumberComesBackUnchanged) {
  const auto all = shared(
      {{.score = score(1, 10, 100),
        .skipped = 1000,
        .work_seconds = 1,
        .saver = {.ready = 1}},
       {.score = score(2, 20, 200),
        .skipped = 2000,
        .work_seconds = 4,
        .stop = true,
        .saver = {.failed = 1, .request = 1}},
       {.score = score(4, 40, 400),
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
           {{.score = score(3)},
            {.score = score(kNan)},
            {.score = score(INFINITY)}})) {
    EXPECT_EQ(sums.bad_rank, 1);
    EXPECT_EQ(sums.loss_sum, 3);
  }
}

TEST(StepSums, ALossThatIsNotFiniteOrNoUnitSkipsTheUpdate) {
  const auto skips = [](const std::vector<Score>& ranks) {
    float skip = -1;
    run_ranks(static_cast<int>(ranks.size()), [&](World& world) {
      const auto rank = static_cast<size_t>(world.rank());
      const auto sums = sum_over_ranks({.score = ranks[rank]}, world);
      const auto one = must_skip(sums, world.size());
      if (rank > 0) return;
      skip = one.defined() ? one.item<float>() : 0;
    });
    return skip;
  };
  EXPECT_EQ(skips({score(3), score(4)}), 0);
  EXPECT_EQ(skips({score(3), {}}), 0);
  EXPECT_EQ(skips({score(3), score(INFINITY)}), 1);
  EXPECT_EQ(skips({score(NAN), score(4)}), 1);
  EXPECT_EQ(skips({score(0, 0), score(0, 0)}), 1);
}

TEST(StepSums, CountsOfTheDeviceAreAdded) {
  Score some = score(1, 5, 2);
  some += score(2, 0, 3);
  some.counts = {torch::tensor(7), torch::tensor(8)};
  EXPECT_EQ(shared({{.score = some}})[0].count, 20);
  EXPECT_EQ(shared({{.score = some}})[0].loss_sum, 3);
  EXPECT_EQ(some.totals().count, 20);
  EXPECT_EQ(some.totals().samples, 5);
}

TEST(StepSums, CountsOfExpertsAreAdded) {
  const auto counts = torch::tensor({{1, 2}, {3, 4}});
  for (const auto& sums :
       shared({{.expert_counts = counts}, {.expert_counts = counts * 10}})) {
    EXPECT_EQ(sums.expert_counts, (std::vector<int64_t>{11, 22, 33, 44}));
  }
  EXPECT_TRUE(shared({{}, {}})[0].expert_counts.empty());
}

TEST(StepSums, OneRankIsNotTheSlowest) {
  const auto sums = shared({{.work_seconds = 2}});
  EXPECT_EQ(sums[0].slowest_rank, -1);
  EXPECT_EQ(sums[0].slowest_excess, 0);
}

}  // namespace echelon::step_sums_test
