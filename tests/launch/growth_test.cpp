#include "echelon/launch/growth.h"

#include <gmock/gmock.h>

namespace echelon::launch::growth_test {

using testing::HasSubstr;
using testing::IsEmpty;

TEST(Growth, IsNeverForALoss) {
  for (const double now : {1e-4, 0.01, 1.0, 60.0}) {
    for (const double factor : {1.0, 1.001, 2.0}) {
      EXPECT_THAT(
          why_not_grow({now, factor * now, 0}),
          HasSubstr("a step is predicted to take "));
    }
  }
}

TEST(Growth, IsForWhatItGainsInTenMinutes) {
  for (const double now : {1e-4, 0.01, 1.0, 60.0}) {
    for (const double change : {0.0, 0.2, 1.0, 59.0}) {
      EXPECT_THAT(why_not_grow({now, 0.5 * now, change}), IsEmpty());
      // A tenth faster saves a minute of ten.
      EXPECT_THAT(why_not_grow({now, 0.9 * now, change}), IsEmpty());
    }
    EXPECT_THAT(
        why_not_grow({now, 0.9 * now, 61}),
        HasSubstr("which saves 60 s in 10 minutes, and the change costs 61 s"));
  }
}

TEST(Growth, IsFreeWhereNothingIsPredicted) {
  EXPECT_THAT(why_not_grow({0, 1, 1000}), IsEmpty());
  EXPECT_THAT(why_not_grow({1, 0, 1000}), IsEmpty());
}

}  // namespace echelon::launch::growth_test
