// Rates of matrix products, convolutions and attention by shape.
#pragma once

#include <vector>

#include "echelon/bench/bench_meter.h"
#include "echelon/cluster/device.h"

namespace echelon {

/// Collective. Products in fp32 and 16 bit; on a processor convolutions and
/// attention in fp32 as well, and what starting an operator takes is taken off.
std::vector<MatrixRate> bench_products(BenchMeter& meter);

}  // namespace echelon
