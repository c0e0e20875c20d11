#include "echelon/schedule/timing.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "echelon/schedule/memory.h"
#include "echelon/schedule/options.h"
#include "tests/support/error_text.h"

namespace echelon::timing_test {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(ScheduleTiming, GivesEachActionItsTime) {
  const auto schedule = make_schedule({ScheduleKind::one_f_one_b, 2, 2, 0});
  const std::vector<StageCost> costs = {
      {.forward = 1, .backward = 3, .transfer = 0.5},
      {.forward = 2, .backward = 4}};
  const Timing timing = time_schedule(schedule, costs, true);
  // rank 0: 0F0 0F1 0B0 0B1; rank 1: 1F0 1B0 1F1 1B1
  std::vector<std::pair<double, double>> times;
  for (const auto& list : timing.actions) {
    for (const auto& time : list) times.emplace_back(time.begin, time.end);
  }
  EXPECT_THAT(
      times, ElementsAre(
                 std::pair(0, 1), std::pair(1, 2), std::pair(8, 11),
                 std::pair(14, 17), std::pair(1.5, 3.5), std::pair(3.5, 7.5),
                 std::pair(7.5, 9.5), std::pair(9.5, 13.5)));
  EXPECT_EQ(timing.makespan, 17);
  EXPECT_EQ(timing.ranks[0].busy, 8);
  EXPECT_EQ(timing.ranks[1].begin, 1.5);
  EXPECT_EQ(timing.ranks[1].end, 13.5);
  EXPECT_DOUBLE_EQ(timing.rank_bubble(0), 1 - 8.0 / 17);
  EXPECT_DOUBLE_EQ(timing.rank_bubble(1), 1 - 12.0 / 17);
  EXPECT_DOUBLE_EQ(timing.bubble, 1 - 20.0 / 34);
  EXPECT_DOUBLE_EQ(timing.span_bubble, 1 - 20.0 / 34);
}

TEST(ScheduleTiming, AStepOnOneRankHasNoTransfers) {
  // Both middle stages of a V are on the last rank.
  const auto schedule = make_schedule({ScheduleKind::zb_v, 1, 1, 0});
  const std::vector<StageCost> costs(2, StageCost{.transfer = 100});
  const Timing timing = time_schedule(schedule, costs);
  EXPECT_EQ(timing.makespan, 6);
  EXPECT_EQ(timing.bubble, 0);
  EXPECT_TRUE(timing.actions.empty());
}

TEST(ScheduleTiming, RefusesWrongCosts) {
  const auto schedule = make_schedule({ScheduleKind::gpipe, 2, 1, 0});
  const auto error = [&](std::vector<StageCost> costs) {
    return error_text<ConfigError>([&] { time_schedule(schedule, costs); });
  };
  EXPECT_THAT(
      error({{}}), HasSubstr("costs of 1 stage, but the schedule has 2"));
  EXPECT_THAT(
      error({{}, {.forward = -1}}), HasSubstr("stage 1 has a cost of -1"));
  EXPECT_THAT(
      error({{.transfer = std::numeric_limits<double>::quiet_NaN()}, {}}),
      HasSubstr("stage 0 has a cost of"));
  auto stuck = schedule;
  std::swap(stuck.ranks[0][0], stuck.ranks[0][1]);
  EXPECT_THAT(
      error_text<ConfigError>([&] { time_schedule(stuck); }),
      HasSubstr("deadlocks"));
}

TEST(ScheduleTiming, FreeActionsHaveNoBubble) {
  const Timing timing = time_schedule(
      make_schedule({ScheduleKind::one_f_one_b, 2, 2, 0}),
      {{0, 0, 0, 0, 0}, {0, 0, 0, 0, 0}});
  EXPECT_EQ(timing.makespan, 0);
  EXPECT_EQ(timing.bubble, 0);
  EXPECT_EQ(timing.rank_bubble(1), 0);
}

TEST(ScheduleMemory, CountsByStageAndByRank) {
  // Rank 1 of interleaved on 2 ranks: "1F0 1F1 3F0 3B0 3F1 3B1 1F2 …".
  const auto peak =
      stored_activations(make_schedule({ScheduleKind::interleaved, 2, 4, 2}));
  EXPECT_THAT(peak.ranks, ElementsAre(5, 3));
  EXPECT_THAT(peak.stages, ElementsAre(4, 3, 2, 1));
}

TEST(ScheduleMemory, WeighsBytesAndWhatWaitsForW) {
  const auto schedule = make_schedule({ScheduleKind::zb_h1, 2, 3, 0});
  // rank 1: 1F0 1I0 1F1 1I1 1W0 …: one that waits for W and one complete.
  const std::vector<StageBytes> bytes = {
      {.activations = 100, .for_weights = 40},
      {.activations = 10, .for_weights = 4}};
  EXPECT_THAT(stored_bytes(schedule, bytes), ElementsAre(200, 14));
  EXPECT_THAT(
      error_text<ConfigError>([&] { stored_bytes(schedule, {{}}); }),
      HasSubstr("sizes of 1 stage, but the schedule has 2"));
}

}  // namespace echelon::timing_test
