// How many activations a schedule stores.
#pragma once

#include <cstdint>
#include <vector>

#include "echelon/schedule/schedule.h"

namespace echelon {

/// Microbatches between their forward and the end of their backward (B, or W),
/// the one that is being computed among them: what a stage must keep in memory.
struct StoredActivations {
  std::vector<int32_t> stages;  // by stage, the most at any time
  /// By rank, the most of its stages together at any time.
  std::vector<int32_t> ranks;
};

/// Follows from each rank's order alone, whatever the actions cost. `schedule`
/// is one that check() accepts.
StoredActivations stored_activations(const Schedule& schedule);

/// What a microbatch of one stage takes.
struct StageBytes {
  double activations = 0;  // from F to the end of B or I
  double for_weights = 0;  // what of it is still needed from I to the end of W
};

/// By rank, the most bytes of activations at any time. `bytes` has an item for
/// each stage.
std::vector<double>
stored_bytes(const Schedule& schedule, const std::vector<StageBytes>& bytes);

}  // namespace echelon
