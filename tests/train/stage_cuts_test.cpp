#include "echelon/train/stage_cuts.h"

#include <gmock/gmock.h>

#include "echelon/schedule/options.h"

namespace echelon::stage_cuts_test {

using testing::ElementsAre;

// Two pipelines of two ranks: the four ranks of the world are (dp 0, pp 0),
// (dp 0, pp 1), (dp 1, pp 0) and (dp 1, pp 1).
class Cuts : public testing::Test {
 protected:
  static Schedule schedule() {
    return make_schedule(
        {.kind = ScheduleKind::one_f_one_b, .ranks = 2, .microbatches = 4});
  }
  static StageWork work() {
    return {
        .boundaries = {0, 4, 8},
        .layers = std::vector<double>(8, 1.0),
        .memory = {.bytes = std::vector<int64_t>(8, 1)}};
  }

  // Steps of ranks that take so many seconds for a layer. Returns the changes,
  // which are made.
  std::vector<timeline::Rebalance>
  train(int64_t steps, const std::vector<double>& seconds) {
    std::vector<timeline::Rebalance> changes;
    for (int64_t i = 0; i < steps; ++i) {
      std::vector<double> worked;
      for (size_t rank = 0; rank < seconds.size(); ++rank) {
        worked.push_back(
            seconds[rank] * static_cast<double>(layers_[rank % 2]));
      }
      const auto change = cuts_.after_step(++step_, worked, left_, cost_);
      if (!change) continue;
      changes.push_back(*change);
      if (takes_effect_) layers_ = change->after;
      cuts_.changed();
    }
    return changes;
  }

  StageCuts cuts_{
      Mesh({.dp_replicate = 2, .pp = 2}), schedule(), work(), /*every=*/4};
  std::vector<int64_t> layers_ = {4, 4};
  int64_t step_ = 0;
  int64_t left_ = 1000000;
  double cost_ = 1;
  bool takes_effect_ = true;
};

TEST_F(Cuts, FollowTheSlowestDeviceOfEachPlace) {
  EXPECT_TRUE(train(5, {1, 1, 1, 3}).empty());
  const auto changes = train(1, {1, 1, 1, 3});
  ASSERT_EQ(changes.size(), 1u);
  EXPECT_THAT(changes[0].before, ElementsAre(4, 4));
  EXPECT_THAT(changes[0].seconds, ElementsAre(4, 12));
  EXPECT_THAT(changes[0].after, ElementsAre(6, 2));
  EXPECT_EQ(changes[0].slowest_after(), 6);
  EXPECT_TRUE(train(100, {1, 1, 1, 3}).empty());  // it stays
  // Until speeds change: the first of the steps that are measured are of both.
  EXPECT_THAT(train(40, {1, 1, 1, 1}).back().after, ElementsAre(4, 4));
}

TEST_F(Cuts, NotForLittle) {
  // The sixth layer is worth more than that.
  EXPECT_TRUE(train(100, {1, 1, 1, 1.2}).empty());
  cost_ = 1e6;
  EXPECT_TRUE(train(100, {1, 1, 1, 3}).empty()) << "it costs too much";
  cost_ = 1;
  left_ = 0;
  EXPECT_TRUE(train(100, {1, 1, 1, 3}).empty()) << "it ends";
}

// 6 s of 12 s are saved in each of the 50 steps of 10 minutes.
TEST_F(Cuts, PayWithinTenMinutes) {
  cost_ = 301;
  EXPECT_TRUE(train(100, {1, 1, 1, 3}).empty());
  cost_ = 299;
  EXPECT_EQ(train(100, {1, 1, 1, 3}).size(), 1u);
}

// What is measured has nothing to do with the layers.
TEST_F(Cuts, ThatDoNotHelpBecomeRare) {
  takes_effect_ = false;
  EXPECT_GE(train(100, {1, 1, 1, 3}).size(), 1u);
  EXPECT_LE(train(1000, {1, 1, 1, 3}).size(), 6u);
}

TEST_F(Cuts, FitTheMemory) {
  StageWork limited = work();
  limited.memory.bytes.assign(8, 10);
  limited.memory.limits = {50, kNoLimit};
  StageCuts cuts(Mesh({.pp = 2}), schedule(), limited, 1);
  std::optional<timeline::Rebalance> change;
  for (int64_t step = 1; step < 10 && !change; ++step) {
    change = cuts.after_step(step, {1, 3}, 1000, 0);
  }
  ASSERT_TRUE(change);
  EXPECT_THAT(change->after, ElementsAre(5, 3));
}

}  // namespace echelon::stage_cuts_test
