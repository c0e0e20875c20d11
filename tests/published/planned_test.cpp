#include "benchmarks/published/planned.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

namespace echelon::planned_test {

RowPrediction row_of(int64_t tp, int64_t pp, int64_t microbatch) {
  StepRow row;
  row.gpu = "A100-SXM-80GB";
  row.gpus = 8;
  row.model = "GPT 1B";
  row.layers = 16;
  row.hidden = 2048;
  row.heads = 16;
  row.seq = 1024;
  row.global_batch = 16;
  row.microbatch_size = microbatch;
  row.tp = tp;
  row.pp = pp;
  row.recompute = "full";
  row.source = "vtrain";
  return predict(row);
}

TEST(Planned, TheSearchComesUponEveryLayoutAndSaysWhatItTakes) {
  std::vector<RowPrediction> rows;
  for (const int64_t tp : {1, 2, 4}) {
    for (const int64_t pp : {1, 2}) {
      for (const int64_t size : {1, 2}) rows.push_back(row_of(tp, pp, size));
    }
  }
  const auto planned = planned_seconds(rows);
  ASSERT_EQ(planned.size(), rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    ASSERT_TRUE(rows[i].predicted()) << rows[i].excluded;
    ASSERT_TRUE(planned[i].has_value()) << cost::to_string(rows[i].strategy);
    // Event by event against in closed form.
    EXPECT_NEAR(*planned[i], rows[i].step.step_seconds, 0.1 * *planned[i])
        << cost::to_string(rows[i].strategy);
  }
}

TEST(Planned, NothingWhereThereIsNoPredictionOrNoPlan) {
  RowPrediction excluded;
  excluded.excluded = "unknown";
  RowPrediction large = row_of(1, 1, 1);
  large.row.layers = 1600;  // does not fit one device
  const auto planned = planned_seconds({excluded, large});
  EXPECT_FALSE(planned[0].has_value());
  EXPECT_FALSE(planned[1].has_value());
}

}  // namespace echelon::planned_test
