// What one rank of this machine computes, moves and sends while all of them do,
// for `echelon bench --save`.
#pragma once

#include "echelon/cluster/measured_machine.h"
#include "echelon/comm/world.h"

namespace echelon {

/// Every rank of the world calls; each is told the same figures, averages over
/// the ranks of medians over time. Ranks begin each round together, so cores,
/// memory and links are shared as they are in training. Takes some seconds.
MachineMeasurement bench_machine(World& world);

}  // namespace echelon
