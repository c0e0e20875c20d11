// Collectives of a rank's parameters and gradients, and what of them
// computation does not hide.
//
// Sources: Rajbhandari et al., 2020, arXiv:1910.02054 (stages of ZeRO);
// overlap.h.
#pragma once

#include "echelon/cost/pass_times.h"

namespace echelon {

/// Seconds of a step, and what of them the rank stands still or is slowed.
struct Exposed {
  double all = 0;
  double exposed = 0;
};

struct ParameterTimes {
  Exposed gradients;   // summing them
  Exposed parameters;  // gathering what ZeRO cuts
};

/// Of a step of `rank`, which has these layers.
ParameterTimes parameter_times(
    const StageContext& context, PassTimes& passes, const Layers& layers,
    int64_t rank);

/// Elements of these layers that the rank's optimizer updates.
double
own_elements(const StageContext& context, const Layers& layers, int64_t rank);

}  // namespace echelon
