// Seconds of one operation: roofline with shapes, and collectives by algorithm.
// Sources: Williams et al., 2009 (roofline); Thakur et al., 2005 (collectives);
// Hu et al., 2025, arXiv:2507.04786 (NCCL's algorithms).
#pragma once

#include "echelon/cluster/cluster.h"
#include "echelon/cost/calibration.h"
#include "echelon/cost/operation.h"
#include "echelon/cost/strategy.h"

namespace echelon {

double matrix_seconds(
    int64_t m, int64_t n, int64_t k, Precision precision, const Device& device,
    const DeviceRates& rates);
double memory_seconds(double bytes, const Device& device, const DeviceRates& rates);

/// The ranks of one group of an axis, as the links see them.
struct GroupPlace {
  int64_t ranks = 1;
  int64_t ranks_per_node = 1;  // of the group
  int64_t nodes = 1;
  /// Groups of the same axis that use a node's adapters at the same time.
  int64_t sharing = 1;
  bool across_racks = false;
};

/// Where the group of `rank` along `axis` lies.
GroupPlace place_of(
    const Strategy& strategy, const Cluster& cluster, Axis axis, int64_t rank = 0);

/// `bytes`: of the whole tensor (what all_gather ends with, what reduce_scatter
/// begins with).
double collective_seconds(
    CollectiveKind kind, double bytes, const GroupPlace& place, const Node& node,
    const Cluster& cluster, const Stack& stack);

/// Of any operation on `rank`.
double operation_seconds(
    const Operation& operation, const Strategy& strategy, const Cluster& cluster,
    int64_t rank = 0);

}  // namespace echelon
