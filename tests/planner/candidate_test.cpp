// Compares candidates, and keeps the fastest layouts.
#include "echelon/planner/search.h"

#include <gtest/gtest.h>

#include <limits>

namespace echelon::planner::candidate_test {

Candidate candidate_of(Layout layout, double seconds, double bytes = 1) {
  Candidate one;
  one.strategy.layout = layout;
  one.step.step_seconds = seconds;
  one.step.memory.reserved_bytes = bytes;
  return one;
}

TEST(Candidate, OfEqualTimesTheSmallerIsFirst) {
  EXPECT_TRUE(is_faster(candidate_of({}, 1, 9), candidate_of({}, 2, 3)));
  EXPECT_TRUE(is_faster(candidate_of({}, 1, 2), candidate_of({}, 1, 3)));
  EXPECT_FALSE(is_faster(candidate_of({}, 1, 3), candidate_of({}, 1, 3)));
}

TEST(Ranking, KeepsTheFastestOfEachLayoutAndTheFastestLayouts) {
  Ranking ranking(2);
  EXPECT_EQ(ranking.limit_seconds({}), std::numeric_limits<double>::infinity());
  ranking.enter(candidate_of({.tp = 2}, 5));
  ranking.enter(candidate_of({.tp = 2}, 7));  // slower: the same layout
  ranking.enter(candidate_of({.tp = 4}, 3));
  EXPECT_EQ(ranking.limit_seconds({.tp = 2}), 5);
  EXPECT_EQ(ranking.limit_seconds({.tp = 4}), 3);
  EXPECT_EQ(ranking.limit_seconds({.pp = 4}), 5);  // the slowest that is kept
  ranking.enter(candidate_of({.pp = 4}, 4));
  const auto best = ranking.sorted();
  ASSERT_EQ(best.size(), 2u);
  EXPECT_EQ(best[0].step.step_seconds, 3);
  EXPECT_EQ(best[1].step.step_seconds, 4);
  EXPECT_EQ(best[1].strategy.layout.pp, 4);
}

// dp and fsdp are one degree of a layout.
TEST(Ranking, CopiesAndShardsAreOneLayout) {
  Ranking ranking(3);
  ranking.enter(candidate_of({.dp_replicate = 4}, 5));
  ranking.enter(candidate_of({.dp_replicate = 2, .dp_shard = 2}, 4));
  ASSERT_EQ(ranking.sorted().size(), 1u);
  EXPECT_EQ(ranking.sorted()[0].step.step_seconds, 4);
}

}  // namespace echelon::planner::candidate_test
