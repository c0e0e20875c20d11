// The pipelines of a job that differ: in the devices that they compute on, on a
// cluster of several kinds, and in where nodes end within them.
#pragma once

#include <cstdint>
#include <vector>

#include "echelon/cluster/cluster.h"
#include "echelon/cost/strategy.h"

namespace echelon::cost {

/// Ranks that differ along pp alone. Without a pipeline: one rank.
struct PipelinePlace {
  int64_t first_rank = 0;
  int64_t data_index = 0;       // of its data-parallel rank
  std::vector<int64_t> groups;  // of the cluster, by pipeline rank
  /// Tells for each pipeline rank whether the next one is in the same node.
  std::vector<bool> next_in_node;
};

/// The first pipeline of each kind. Kinds differ in the groups of nodes, in
/// where nodes end between neighbours, or in the size of their microbatches.
std::vector<PipelinePlace>
distinct_pipelines(const Strategy& strategy, const cluster::Cluster& cluster);

/// All pipelines, in order of their first rank.
std::vector<PipelinePlace>
all_pipelines(const Strategy& strategy, const cluster::Cluster& cluster);

/// Samples of a microbatch on a data-parallel rank.
int64_t microbatch_of(const Strategy& strategy, int64_t data_index);

/// The strategy as if all data-parallel ranks had microbatches of this size.
Strategy with_microbatch(const Strategy& strategy, int64_t samples);

}  // namespace echelon::cost
