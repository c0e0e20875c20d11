#include "echelon/bench/usual_pace.h"

#include <gtest/gtest.h>

namespace echelon {
namespace usual_pace_test {

TEST(UsualPace, CoresAreSlowWhereTheyWereQuicker) {
  UsualPace pace(3);
  EXPECT_FALSE(pace.slow(2));
  EXPECT_FALSE(pace.slow(2.4));
  EXPECT_TRUE(pace.slow(2.6));
  EXPECT_FALSE(pace.slow(1));
  EXPECT_TRUE(pace.slow(2));
  EXPECT_TRUE(pace.slow(2));
  EXPECT_FALSE(pace.slow(2));  // patience ends
}

}  // namespace usual_pace_test
}  // namespace echelon
