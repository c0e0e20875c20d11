#include "echelon/bench/bench_rates.h"

#include <gtest/gtest.h>

namespace echelon::bench::bench_launches_test {

TEST(BenchLaunches, FitFindsTheOverheadOfBothKinds) {
  const OperatorCounts linear{8, 40}, functions{18, 6};
  const auto seconds = [](const OperatorCounts& counts) {
    return counts.computing * 2.5e-6 + counts.views * 0.3e-6;
  };
  const Launches found =
      fit_launches(linear, seconds(linear), functions, seconds(functions));
  EXPECT_NEAR(found.computing, 2.5e-6, 1e-15);
  EXPECT_NEAR(found.view, 0.3e-6, 1e-15);
}

TEST(BenchLaunches, BothKindsAreEqualWhereOneWouldBeNegative) {
  for (const auto& [a, b] : {std::pair(10e-6, 60e-6), std::pair(60e-6, 1e-6)}) {
    const Launches found = fit_launches({10, 30}, a, {20, 10}, b);
    EXPECT_NEAR(found.computing, (a + b) / 70, 1e-15);
    EXPECT_EQ(found.computing, found.view);
  }
}

}  // namespace echelon::bench::bench_launches_test
