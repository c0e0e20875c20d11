#include "benchmarks/published/table_errors.h"

#include <gtest/gtest.h>

namespace echelon::table_errors_test {

RowPrediction row(const char* file, double measured, double predicted) {
  RowPrediction one;
  one.row.file = file;
  one.row.step_seconds = measured;
  one.step.step_seconds = predicted;
  return one;
}

TEST(TableErrors, ByFile) {
  auto left_out = row("b", 1, 0);
  left_out.excluded = "no such device";
  const auto files = errors_by_file(
      {row("a", 10, 11), row("b", 4, 2), row("a", 10, 8), row("a", 10, 10),
       left_out, row("a", 0, 3)});
  ASSERT_EQ(files.size(), 2u);
  EXPECT_EQ(files[0].file, "a");
  EXPECT_EQ(files[0].rows, 4);
  EXPECT_EQ(files[0].predicted, 4);
  EXPECT_EQ(files[0].with_step, 3);
  EXPECT_NEAR(files[0].mean, 0.1, 1e-12);
  EXPECT_NEAR(files[0].median, 0.1, 1e-12);
  EXPECT_NEAR(files[0].bias, -0.1 / 3, 1e-12);
  EXPECT_EQ(files[1].rows, 2);
  EXPECT_EQ(files[1].predicted, 1);
  EXPECT_NEAR(files[1].mean, 0.5, 1e-12);
  EXPECT_EQ(files[1].excluded.at("no such device"), 1);
}

TEST(TableErrors, RankCorrelation) {
  EXPECT_NEAR(rank_correlation({1, 2, 3, 4}, {10, 20, 30, 99}), 1, 1e-12);
  EXPECT_NEAR(rank_correlation({1, 2, 3, 4}, {4, 3, 2, 1}), -1, 1e-12);
  EXPECT_NEAR(rank_correlation({1, 2, 2, 3}, {1, 2, 2, 3}), 1, 1e-12);
  EXPECT_NEAR(rank_correlation({1, 2, 3, 4, 5}, {2, 1, 4, 3, 5}), 0.8, 1e-12);
  EXPECT_EQ(rank_correlation({1, 1, 1}, {1, 2, 3}), 0);
  EXPECT_EQ(rank_correlation({1}, {1}), 0);
}

}  // namespace echelon::table_errors_test
