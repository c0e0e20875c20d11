// Rates of matmuls, convolutions and attention by shape.
#pragma once

#include <vector>

#include "echelon/bench/bench_meter.h"
#include "echelon/cluster/device.h"

namespace echelon {

/// Collective. Matmuls in fp32 and 16 bit; on a processor also convolutions and
/// attention in fp32, with the launch overhead subtracted.
std::vector<MatrixRate> bench_matmuls(BenchMeter& meter);

}  // namespace echelon
