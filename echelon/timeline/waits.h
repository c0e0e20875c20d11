// Where a backward pass waits for gradients of other ranks.
#pragma once

#include <vector>

#include "echelon/timeline/timeline.h"

namespace echelon {

/// Adds to each backward span the stretch in which it only waits, as a nested
/// span of kind `communication` on the same track.
///
/// A trainer sees one call, backward(), which starts collectives on the way and
/// returns when all are done. The last of them starts when the last gradient is
/// there; from then on nothing is left to compute, until the last of them has
/// ended. Without this, no communication would ever look exposed.
///
/// `spans` are of one rank. A backward span during which no collective began,
/// or in which a wait was recorded already, stays as it is; so does a
/// pipeline's
/// ("0B3"), which records its waits itself.
void add_backward_waits(std::vector<Span>& spans);

}  // namespace echelon
