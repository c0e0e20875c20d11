// Whether a schedule can be run.
#pragma once

#include "echelon/schedule/schedule.h"

namespace echelon {

/// Throws ConfigError with the first fault; the message names rank, action and
/// way out. It looks, in this order, for
/// - no ranks, no stages or no microbatches; a stage on a rank that does not
///   exist; a rank without a stage;
/// - rank by rank, an action of a stage or microbatch that does not exist, or
///   of a stage that another rank holds; a repeated action; B next to I or W of
///   the same stage and microbatch; W before its I; a backward before its
///   forward;
/// - a missing forward or backward, or an I without its W;
/// - a deadlock: every rank runs its list in order, and an action that needs
///   another rank's result blocks until it arrives. A send does not wait for
///   its receiver. The message names the ranks that wait for each other.
/// Time and memory grow with the number of actions.
void check(const Schedule& schedule);

}  // namespace echelon
