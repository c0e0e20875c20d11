// What the planner makes of the rows of a table: how long it says the layout of
// each takes, where its search comes upon it. The layout that it puts first
// among those that were measured is the one with the least.
#pragma once

#include <optional>
#include <vector>

#include "benchmarks/published/predict.h"

namespace echelon {

/// Seconds of each row's step, in the rows' order. The planner is given the
/// row's model, cluster, batch and software, with microbatch size, schedule,
/// recompute, sequence parallelism and sharding stage fixed; it searches the
/// degrees. Nothing for a row that has no prediction, or whose layout the
/// search does not come upon: that the software's rules rule out, or that does
/// not fit by its bound.
std::vector<std::optional<double>>
planned_seconds(const std::vector<RowPrediction>& predictions);

}  // namespace echelon
