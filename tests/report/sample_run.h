// Made-up runs, the same each time, for tests of the report and for looking at
// it without training.
#pragma once

#include <cstdint>
#include <string>

#include "echelon/report/report.h"

namespace echelon::sample {

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
StepPrediction prediction_of(const Timeline& timeline);

/// A data-parallel run whose last all-reduces outlast the backward pass.
ReportInput run(const RunShape& shape);

/// For assertions on pages: matchers print the whole page when they fail.
inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline size_t count(const std::string& text, const std::string& part) {
  size_t result = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; ++at) {
    ++result;
  }
  return result;
}

}  // namespace echelon::sample
