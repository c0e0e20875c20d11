// Rates of what networks compute: matmuls, convolutions and attention by shape,
// and the operators that are bound by memory, on a processor without the launch
// overhead; and that overhead, the host's time for an operator in training.
#pragma once

#include <functional>
#include <vector>

#include "echelon/bench/bench_meter.h"
#include "echelon/cluster/device.h"

namespace echelon::bench {

/// Collective. Matmuls in fp32 and 16 bit; on a processor also convolutions and
/// attention in fp32.
std::vector<cluster::MatrixRate> bench_matmuls(BenchMeter& meter);

/// Collective. Rates of the operators that networks spend time in, at sizes
/// that fit in the caches and at sizes that do not; "add" is a plain stream.
std::vector<cluster::OperatorRate> bench_operators(BenchMeter& meter);

/// The smallest operator, which autograd does not record: its time is all
/// launch overhead.
std::function<void()> smallest_call(torch::Device device);

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
std::vector<cluster::LaunchRate> bench_launches(BenchMeter& meter);

}  // namespace echelon::bench
