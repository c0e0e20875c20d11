// Parts of a model and of a batch in proportion to the devices that they are
// for, on a cluster of several kinds.
#pragma once

#include <cstdint>
#include <vector>

#include "echelon/planner/search_space.h"

namespace echelon {

/// How much one device of each group of nodes computes of this model in a
/// second, as a share of the fastest. Empty where all do the same.
std::vector<double> device_speeds(
    const ModelShape& model, const Cluster& cluster, int64_t seq_len,
    Precision precision, const std::string& stack);

/// Layers of each stage, for stages that take about as long, and for stages
/// that fill the memory of their devices alike. Where pipelines lie on
/// different devices, the slowest and the smallest at each place count. Nothing
/// where the devices of all stages are alike. `job.speeds` are device_speeds().
std::vector<std::vector<int64_t>>
sized_stages(const SearchJob& job, const Strategy& strategy);

/// The speed of each data-parallel rank's pipeline, that of its slowest device.
/// Empty where all have the same.
std::vector<double>
data_rank_speeds(const SearchJob& job, const Strategy& strategy);

/// `units` in whole numbers, each 1 or more, so that the largest of share /
/// weight is as small as can be; `taken`: what lies there already. Empty when
/// there are fewer units than weights.
std::vector<int64_t> share_out(
    int64_t units, const std::vector<double>& weights,
    const std::vector<double>& taken = {});

}  // namespace echelon
