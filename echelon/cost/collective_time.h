// Seconds of a collective, by algorithm and by the placement of its ranks.
// Sources: Thakur et al., 2005 (rings and trees); Hu et al., 2025,
// arXiv:2507.04786 (what NCCL does); constants: device_rates.cpp.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>

#include "echelon/cluster/cluster.h"
#include "echelon/cost/device_rates.h"
#include "echelon/cost/framework.h"
#include "echelon/cost/operation.h"
#include "echelon/cost/strategy.h"

namespace echelon::cost {

/// The ranks of one group of an axis, as the links see them.
struct GroupPlace {
  int64_t ranks = 1;
  int64_t ranks_per_node = 1;  // of the group
  int64_t nodes = 1;
  /// Groups of the same axis that share a node's adapters at the same time.
  int64_t sharing = 1;
  bool across_racks = false;

  bool operator==(const GroupPlace&) const = default;
};

/// Placement of the group of `rank` along `axis`.
GroupPlace place_of(
    const Strategy& strategy, const cluster::Cluster& cluster, Axis axis,
    int64_t rank = 0);
/// The placement of the group along several axes. Dense gradients are summed
/// along {dp_replicate, dp_shard, cp, ep}.
GroupPlace place_of(
    const Strategy& strategy, const cluster::Cluster& cluster,
    std::span<const Axis> axes, int64_t rank = 0);
/// Placement of `members` ranks of an axis that are `apart` from each other.
GroupPlace place_of_part(
    const Strategy& strategy, const cluster::Cluster& cluster, Axis axis,
    int64_t members, int64_t apart, int64_t rank = 0);
inline GroupPlace place_of(
    const Strategy& strategy, const cluster::Cluster& cluster,
    std::initializer_list<Axis> axes, int64_t rank = 0) {
  return place_of(
      strategy, cluster, std::span(axes.begin(), axes.size()), rank);
}

/// `bytes`: of the whole tensor (all_gather's output, reduce_scatter's input, a
/// rank's input of all_to_all, the message of send). 0 for a group of one.
double collective_seconds(
    CollectiveKind kind, double bytes, const GroupPlace& place,
    const cluster::Node& node, const cluster::Cluster& cluster,
    const Framework& framework);

/// Seconds that a pipeline message takes from one rank to another, as the
/// framework sends it.
double transfer_seconds(
    const Strategy& strategy, const cluster::Cluster& cluster,
    const Framework& framework, double bytes, int64_t sender, int64_t receiver);

}  // namespace echelon::cost
