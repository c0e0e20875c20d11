// Rates of what networks compute: matmuls, convolutions and attention by shape,
// and the operators that are bound by memory. On a processor the launch
// overhead is subtracted.
#pragma once

#include <functional>
#include <vector>

#include "echelon/bench/bench_meter.h"
#include "echelon/cluster/device.h"

namespace echelon {

/// Collective. Matmuls in fp32 and 16 bit; on a processor also convolutions and
/// attention in fp32.
std::vector<MatrixRate> bench_matmuls(BenchMeter& meter);

/// Collective. Rates of the operators that networks spend time in, at sizes
/// that fit in the caches and at sizes that do not; "add" is a plain stream.
std::vector<OperatorRate> bench_operators(BenchMeter& meter);

/// The smallest operator, which autograd does not record: its time is all
/// launch overhead.
std::function<void()> smallest_call(torch::Device device);

}  // namespace echelon
