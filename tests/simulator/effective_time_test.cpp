#include "echelon/simulator/effective_time.h"

#include <gmock/gmock.h>

#include <cmath>

#include "echelon/cluster/catalogue.h"
#include "echelon/error.h"
#include "tests/support/error_text.h"

namespace echelon::simulator::effective_time_test {

using testing::HasSubstr;

cluster::Cluster failing(double hours_of_a_node) {
  cluster::Cluster cluster = cluster::find_cluster("h100-sxm:128x8");
  cluster.mean_hours_between_failures = hours_of_a_node;
  return cluster;
}

TEST(EffectiveTime, TheBestIntervalIsYoungsForShortSaves) {
  // sqrt(2 * 10 s * 1e6 s) = 4472 s; Daly's terms change it by less than 1 %.
  EXPECT_NEAR(best_interval(10, 1e6), 4472, 45);
  // Saves that take longer than a job lives are not worth many.
  EXPECT_EQ(best_interval(100, 40), 40);
}

TEST(EffectiveTime, NoIntervalIsBetterThanTheBest) {
  const cluster::Cluster cluster = failing(10000);
  FailureOptions options{.checkpoint_seconds = 60, .recovery_seconds = 600};
  const double step = 5;
  const EffectiveTime best = effective_time(cluster, 128, step, options);
  for (const double factor : {0.25, 0.5, 2.0, 4.0}) {
    options.checkpoint_interval_seconds = best.interval_seconds * factor;
    EXPECT_LT(
        effective_time(cluster, 128, step, options).expected_share,
        best.expected_share)
        << factor;
  }
}

TEST(EffectiveTime, SimulatedFailuresAgreeWithTheFormula) {
  for (const double hours_of_a_node : {20000.0, 2000.0, 400.0}) {
    const FailureOptions options{
        .hours = 200000,
        .checkpoint_seconds = 60,
        .recovery_seconds = 600,
        .seed = 7};
    const auto time = effective_time(failing(hours_of_a_node), 128, 4, options);
    EXPECT_NEAR(time.share, time.expected_share, 0.01) << hours_of_a_node;
    EXPECT_NEAR(
        time.share + time.saving + time.lost + time.recovering, 1, 1e-9);
    const double expected = options.hours / (hours_of_a_node / 128);
    EXPECT_NEAR(static_cast<double>(time.failures) / expected, 1, 0.1);
  }
}

TEST(EffectiveTime, IntervalsAreWholeSteps) {
  const EffectiveTime time = effective_time(failing(5000), 128, 33, {});
  EXPECT_NEAR(std::remainder(time.interval_seconds, 33), 0, 1e-9);
  EXPECT_GE(time.interval_seconds, 33);
}

TEST(EffectiveTime, NodesThatDoNotFailCostTheSavesAlone) {
  const EffectiveTime time = effective_time(
      failing(0), 128, 10,
      {.hours = 1000,
       .checkpoint_seconds = 10,
       .checkpoint_interval_seconds = 90});
  EXPECT_EQ(time.failures, 0);
  EXPECT_NEAR(time.share, 0.9, 1e-3);
  EXPECT_NEAR(time.expected_share, 0.9, 1e-12);
  EXPECT_EQ(time.lost, 0);
}

TEST(EffectiveTime, TheSeedDrawsTheFailures) {
  const cluster::Cluster cluster = failing(1000);
  const EffectiveTime a = effective_time(cluster, 128, 5, {.seed = 1});
  EXPECT_EQ(a.share, effective_time(cluster, 128, 5, {.seed = 1}).share);
  EXPECT_NE(a.share, effective_time(cluster, 128, 5, {.seed = 2}).share);
}

TEST(EffectiveTime, ImpossibleTimesAreNamed) {
  EXPECT_THAT(
      error_text([] { effective_time(failing(1), 0, 5, {}); }),
      HasSubstr("nodes"));
  EXPECT_THAT(
      error_text([] { effective_time(failing(1), 1, 5, {.hours = 0}); }),
      HasSubstr("hours"));
}

}  // namespace echelon::simulator::effective_time_test
