// The collectives of a run, in its timeline.
#pragma once

#include <memory>

#include "echelon/comm/world.h"
#include "echelon/timeline/recorder.h"

namespace echelon {

/// From now on records each collective of this rank as a span, and where the
/// rank waited for it.
void record_collectives(
    World& world, std::shared_ptr<timeline::Recorder> recorder);

}  // namespace echelon
