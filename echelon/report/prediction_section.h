// A predicted step beside the measured one: two bars on one scale, the parts in
// figures, memory by kind.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/report/markup.h"
#include "echelon/timeline/memory_kind.h"
#include "echelon/timeline/overlap.h"
#include "echelon/timeline/timeline.h"

namespace echelon::report {

struct PredictedMemory {
  int32_t rank = 0;
  timeline::MemoryByKind memory;  // at its fullest moment
};

struct StepPrediction {
  std::string cluster = {};  // what it is predicted on
  double step_seconds = 0;   // 0: there is no prediction
  timeline::TimedParts parts = {};
  std::vector<PredictedMemory> memory = {};  // by rank
  /// Why there is none, and how to get one: a sentence or two.
  std::string missing = {};

  bool is_there() const { return step_seconds > 0; }
};

/// The fullest moment of each measured rank in the recorded steps.
std::vector<PredictedMemory>
fullest_moments(const timeline::Timeline& timeline);

/// Draws the prediction beside the run's figures; for a simulated timeline it
/// stands alone. `diagnosis` is that of `timeline`. Without a prediction, draws
/// the line that says how to get one.
void draw_prediction(
    Markup& page, const StepPrediction& prediction,
    const timeline::Timeline& timeline, const timeline::Diagnosis& diagnosis);

/// "Predicted on h100-sxm:1x8: 12.3 ms a step; measured 13.1 ms, 1.07 times as
/// long …"; empty when nothing was measured.
std::string prediction_sentence(
    const StepPrediction& prediction, const timeline::TimedParts& measured);

}  // namespace echelon::report
