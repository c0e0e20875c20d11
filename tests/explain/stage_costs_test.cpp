#include "echelon/explain/findings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace echelon {
namespace stage_costs_test {

using testing::ElementsAre;

Span pass(
    int32_t rank, const std::string& name, SpanKind kind, int64_t begin_ms,
    int64_t end_ms) {
  return {rank, "compute", name, kind, begin_ms * 1'000'000, end_ms * 1'000'000,
          0};
}

// Two stages, the second one twice as long; rank 1 is in its pass before its
// input is.
Timeline two_stages() {
  return {
      .spans = {
          pass(0, "0F0", SpanKind::forward, 0, 10),
          pass(0, "wait 1B0", SpanKind::communication, 10, 70),
          pass(0, "0B0", SpanKind::backward, 70, 90),
          pass(1, "1F0", SpanKind::forward, 2, 30),
          pass(1, "wait 0F0", SpanKind::communication, 4, 12),
          pass(1, "1B0", SpanKind::backward, 30, 70)}};
}

TEST(StageCosts, AreForwardAndBackwardWithoutTheWaitsInside) {
  const auto costs = stage_costs(two_stages(), {0});
  ASSERT_TRUE(costs);
  EXPECT_THAT(
      costs->seconds,
      ElementsAre(
          testing::DoubleNear(0.030, 1e-9), testing::DoubleNear(0.060, 1e-9)));
  EXPECT_THAT(costs->slowest_ranks, ElementsAre(1));
  EXPECT_NEAR(costs->as_they_are, 0.090, 1e-9);
  EXPECT_NEAR(costs->even, 0.090, 1e-9);  // one microbatch: no rank is ahead
  EXPECT_NEAR(costs->busy_share, 0.5, 1e-9);
}

TEST(StageCosts, OfWhatIsNoPipelineAreNone) {
  EXPECT_FALSE(stage_costs(
      {.spans = {pass(0, "forward", SpanKind::forward, 0, 1)}}, {0}));
  EXPECT_FALSE(stage_costs(two_stages(), {1}));
}

}  // namespace stage_costs_test
}  // namespace echelon
