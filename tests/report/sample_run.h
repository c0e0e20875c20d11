// Made-up runs, the same each time, for tests of the report and for looking at
// it without training.
#pragma once

#include <cstdint>
#include <string>

#include "echelon/report/report.h"

namespace echelon::report::sample {

struct RunShape {
  int64_t steps = 600;
  int32_t ranks = 4;
  int64_t recorded_steps = 20;
  int buckets = 5;
  int layers = 1;        // spans of forward and backward each
  double slow_rank = 0;  // excess of the last rank's work
};

/// The same with memory: activations that grow in forward and fall in backward.
ReportInput run_with_memory(const RunShape& shape);

/// What a simulator might have said of the run: most parts too short, no wait
/// for data, memory a little less than measured.
StepPrediction prediction_of(const timeline::Timeline& timeline);

/// The run with that prediction.
ReportInput with_prediction(ReportInput input);

/// A data-parallel run whose last all-reduces outlast the backward pass.
ReportInput run(const RunShape& shape);

/// A run with texts and figures that a page must survive.
ReportInput hostile();

/// A short run with another timeline.
ReportInput with_timeline(timeline::Timeline timeline);

}  // namespace echelon::report::sample
