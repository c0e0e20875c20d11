#include "echelon/train/strategies/model_partition.h"

#include <gmock/gmock.h>

#include "echelon/layout/mesh.h"
#include "echelon/layout/partition.h"
#include "echelon/schedule/options.h"

namespace echelon::model_partition_test {

using testing::ElementsAre;
using testing::IsEmpty;

Schedule schedule_of(ScheduleKind kind) {
  return make_schedule({.kind = kind, .ranks = 2, .microbatches = 4});
}

TEST(StageSpeeds, AreThoseOfTheSlowestDevice) {
  const auto schedule = schedule_of(ScheduleKind::one_f_one_b);
  // Ranks 0 and 1 are a pipeline, 2 and 3 are another.
  const Mesh mesh({.dp_replicate = 2, .pp = 2});
  EXPECT_THAT(stage_speeds(mesh, schedule, {1, 1, 1, 1}), IsEmpty());
  EXPECT_THAT(stage_speeds(mesh, schedule, {1, 1.1, 0.97, 1}), IsEmpty());
  EXPECT_THAT(stage_speeds(mesh, schedule, {1, 1, 1, 4}), ElementsAre(1, 0.25));
  EXPECT_THAT(stage_speeds(mesh, schedule, {1, 2, 2, 1}), IsEmpty());
  EXPECT_THAT(stage_speeds(mesh, schedule, {4, 1, 1, 2}), ElementsAre(0.5, 1));
}

TEST(StageSpeeds, OfRanksWithSeveralStages) {
  const auto schedule = schedule_of(ScheduleKind::zb_v);
  ASSERT_THAT(schedule.rank_of_stage, ElementsAre(0, 1, 1, 0));
  const auto speeds = stage_speeds(Mesh({.pp = 2}), schedule, {3, 1});
  EXPECT_THAT(speeds, ElementsAre(1.0 / 3, 1, 1, 1.0 / 3));
  // Of sixteen equal layers, the slow rank has a quarter of them.
  EXPECT_THAT(
      balance(
          std::vector<double>(16, 1.0), 4,
          {.bytes = std::vector<int64_t>(16, 1)}, speeds),
      ElementsAre(0, 2, 8, 14, 16));
}

}  // namespace echelon::model_partition_test
