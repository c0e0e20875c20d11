// Whether a schedule can be run.
#pragma once

#include "echelon/schedule/schedule.h"

namespace echelon {

/// Throws ConfigError with the first fault; the message names rank, action and
/// way out. In this order it looks for
/// - no ranks, no stages or no microbatches, a stage whose rank is not there, a
///   rank without a stage;
/// - rank by rank, an action of a stage or microbatch that is not there, or of
///   a stage that another rank holds; a repeated one; B beside I or W of the
///   same stage and microbatch; W before its I; a backward before its forward;
/// - a missing action, a forward, a backward, or the W to an I;
/// - a deadlock: every rank runs its list in order, and an action that needs
///   another rank's result blocks until it is there. A send does not wait for
///   its receiver. The message names the ranks that wait for each other.
/// Time and memory grow with the number of actions.
void check(const Schedule& schedule);

}  // namespace echelon
