// Rates of matrix products, convolutions and attention by shape.
#pragma once

#include <vector>

#include "echelon/cluster/device.h"
#include "echelon/train/bench_meter.h"

namespace echelon {

/// Collective. Products in fp32 and 16 bit; on a processor convolutions and attention
/// in fp32 as well. What starting an operator takes, `start_seconds`, is taken off.
std::vector<MatrixRate> bench_products(BenchMeter& meter, double start_seconds);

}  // namespace echelon
