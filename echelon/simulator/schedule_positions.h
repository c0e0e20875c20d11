// Where each action of a schedule stands among those of its kind and stage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "echelon/schedule/schedule.h"

namespace echelon::simulator {

/// Among the actions of one kind and stage in a step. Backward counts as last
/// when none after it gives gradients of the stage's weights.
struct Position {
  bool first = false;
  bool last = false;
  size_t number() const { return (first ? 1u : 0u) + (last ? 2u : 0u); }
};

struct SchedulePositions {
  /// By stage: which of its rank's stages it is, from 0.
  std::vector<int32_t> local;
  /// By coordinate along pp, of each action of its list.
  std::vector<std::vector<Position>> actions;
};

SchedulePositions positions_of(const Schedule& schedule);

}  // namespace echelon::simulator
