// Stages and batches in proportion to their devices, on a cluster of several
// kinds.
#pragma once

#include <cstdint>
#include <vector>

#include "echelon/planner/search_space.h"

namespace echelon::planner {

/// The speed at which one device of each group of nodes computes this model, as
/// a share of the fastest. Empty where all are alike.
std::vector<double> device_speeds(
    const cost::ModelShape& model, const cluster::Cluster& cluster,
    int64_t seq_len, cluster::Precision precision,
    const std::string& framework);

/// The layers of each stage, in two ways: stages that take about as long as
/// each other, and stages that fill their devices' memory equally. Where
/// pipelines use different devices, the slowest and the smallest at each place
/// count. Empty where the devices of all stages are alike. `job.speeds` are
/// device_speeds().
std::vector<std::vector<int64_t>>
sized_stages(const SearchJob& job, const cost::Strategy& strategy);

/// The speed of each data-parallel rank's pipeline, which is that of its
/// slowest device. Empty where all are alike.
std::vector<double>
data_rank_speeds(const SearchJob& job, const cost::Strategy& strategy);

}  // namespace echelon::planner
