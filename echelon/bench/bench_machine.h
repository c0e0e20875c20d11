// What one rank of this machine computes, moves and sends while all ranks do
// the same, for `echelon bench --save`.
#pragma once

#include "echelon/cluster/measured_machine.h"
#include "echelon/comm/world.h"

namespace echelon::bench {

/// Collective. Every rank returns the same figures: medians over rounds,
/// averaged over the ranks. Ranks begin each round together, so that they share
/// cores, memory and links as they do in training. Takes about a minute.
cluster::MachineMeasurement bench_machine(World& world);

}  // namespace echelon::bench
