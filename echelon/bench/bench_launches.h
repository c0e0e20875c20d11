// Launch overhead of an operator in training: the host's time for it.
#pragma once

#include <vector>

#include "echelon/bench/bench_meter.h"
#include "echelon/cluster/device.h"

namespace echelon {

/// Operators of a pass through a network.
struct OperatorCounts {
  double computing = 0;
  double views = 0;  // compute nothing
};

/// Launch overhead of one operator of each kind, in seconds.
struct Launches {
  double computing = 0;
  double view = 0;
};

/// Solves for the launch overhead by the seconds of two networks, neither of
/// which has more operators of both kinds. Where the noise exceeds their
/// difference, both kinds get the mean over all operators.
Launches fit_launches(
    const OperatorCounts& a, double a_seconds, const OperatorCounts& b,
    double b_seconds);

/// Collective. Launch overhead in training, by the bytes that neighbouring
/// operators move. Each figure is spread over all operators of a small network,
/// as count_operators counts them.
std::vector<LaunchRate> bench_launches(BenchMeter& meter);

}  // namespace echelon
