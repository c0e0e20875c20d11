// How many activations a schedule stores.
#pragma once

#include <cstdint>
#include <vector>

#include "echelon/schedule/schedule.h"

namespace echelon {

/// How many microbatches a stage must keep in memory: those between their
/// forward and the end of their backward (B, or W), including the one that is
/// being computed.
struct StoredActivations {
  std::vector<int32_t> stages;  // by stage, the most at any time
  /// By rank, the most of its stages together at any time.
  std::vector<int32_t> ranks;
};

/// Depends on each rank's order alone, not on what the actions cost. `schedule`
/// is one that check() accepts.
StoredActivations stored_activations(const Schedule& schedule);

/// Bytes of one microbatch on one stage.
struct StageBytes {
  double activations = 0;  // from F to the end of B or I
  double for_weights = 0;  // the part still needed from I to the end of W
};

/// The most bytes of activations at any time, by rank. `bytes` has an item for
/// each stage.
std::vector<double>
stored_bytes(const Schedule& schedule, const std::vector<StageBytes>& bytes);

}  // namespace echelon
