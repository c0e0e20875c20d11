// The strategy of a row: what its cells say, and for empty cells what the
// software does with which it was measured.
#pragma once

#include <string>

#include "benchmarks/published/step_row.h"
#include "echelon/cluster/cluster.h"
#include "echelon/cost/model_shape.h"
#include "echelon/cost/strategy.h"

namespace echelon {

/// The software, a name of framework_names(): by words of the row's texts; of a
/// source that is not known by its sharding, its precision and its device.
/// row_strategy.cpp has the rules in order.
std::string framework_of(const StepRow& row);

/// Cells left empty: dp from gpus, tp, pp and cp; degrees 1; schedule 1f1b,
/// interleaved with virtual stages; precision fp16 on a V100, else bf16; the
/// least recompute with which it fits; microbatches of one sample in a
/// pipeline, else of the largest power of two up to 16 that fits.
///
/// Throws ConfigError that names the cells when they contradict each other or
/// are not understood.
cost::Strategy strategy_of(
    const StepRow& row, const cost::ModelShape& model,
    const cluster::Cluster& cluster);

}  // namespace echelon
