// Seconds of a collective, by algorithm and by where its ranks lie.
// Sources: Thakur et al., 2005 (rings and trees); Hu et al., 2025,
// arXiv:2507.04786 (what NCCL does); constants: device_rates.cpp.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>

#include "echelon/cluster/cluster.h"
#include "echelon/cost/device_rates.h"
#include "echelon/cost/operation.h"
#include "echelon/cost/stack.h"
#include "echelon/cost/strategy.h"

namespace echelon {

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
    const Strategy& strategy, const Cluster& cluster, Axis axis,
    int64_t rank = 0);
/// Of the group over several axes together: who sums a dense gradient is
/// {dp_replicate, dp_shard, cp, ep}.
GroupPlace place_of(
    const Strategy& strategy, const Cluster& cluster,
    std::span<const Axis> axes, int64_t rank = 0);
inline GroupPlace place_of(
    const Strategy& strategy, const Cluster& cluster,
    std::initializer_list<Axis> axes, int64_t rank = 0) {
  return place_of(
      strategy, cluster, std::span(axes.begin(), axes.size()), rank);
}

/// `bytes`: of the whole tensor (what all_gather ends with, what reduce_scatter
/// begins with, what a rank hands to all_to_all, what send carries). 0 for a
/// group of one.
double collective_seconds(
    CollectiveKind kind, double bytes, const GroupPlace& place,
    const Node& node, const Cluster& cluster, const Stack& stack);

/// Of a message of the pipeline from one rank to another, as the stack sends
/// it.
double transfer_seconds(
    const Strategy& strategy, const Cluster& cluster, const Stack& stack,
    double bytes, int64_t sender, int64_t receiver);

}  // namespace echelon
