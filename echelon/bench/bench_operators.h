// Rates of operators that move their tensors, and what starting one takes.
#pragma once

#include <functional>
#include <vector>

#include "echelon/bench/bench_meter.h"
#include "echelon/cluster/device.h"

namespace echelon {

/// Collective. Of the operators that networks spend time in, at sizes that lie
/// in caches and that do not; "add" is a plain stream. On a processor, what
/// starting one takes is taken off.
std::vector<OperatorRate> bench_operators(BenchMeter& meter);

/// The smallest operator, not seen by autograd: starting it is all that it
/// takes.
std::function<void()> smallest_call(torch::Device device);

/// Of an operator in training, by what those around it move: spread over all
/// operators of a small network, as count_operators counts them.
std::vector<LaunchRate> bench_launches(BenchMeter& meter);

}  // namespace echelon
