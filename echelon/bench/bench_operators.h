// Rates of the operators that are bound by memory.
#pragma once

#include <functional>
#include <vector>

#include "echelon/bench/bench_meter.h"
#include "echelon/cluster/device.h"

namespace echelon {

/// Collective. Rates of the operators that networks spend time in, at sizes
/// that fit in the caches and at sizes that do not; "add" is a plain stream. On
/// a processor the launch overhead is subtracted.
std::vector<OperatorRate> bench_operators(BenchMeter& meter);

/// The smallest operator, which autograd does not record: its time is all
/// launch overhead.
std::function<void()> smallest_call(torch::Device device);

}  // namespace echelon
