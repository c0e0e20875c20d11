// How uneven ranks are that compute the same on one machine.
#pragma once

#include "echelon/bench/bench_meter.h"
#include "echelon/comm/world.h"

namespace echelon {

/// Collective, of a processor. Standard deviation of 1 ms of computing from
/// rank to rank, in seconds: from how much longer forwards and backwards of
/// small networks take when ranks wait for each other after each than when they
/// do not, beside what the call itself takes. One rank: 0.
double bench_jitter(BenchMeter& meter, World& world);

}  // namespace echelon
