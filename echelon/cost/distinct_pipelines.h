// The pipelines of a job that are not alike: on a cluster of several kinds of
// devices, by what each computes on; and where nodes end within some of them.
#pragma once

#include <cstdint>
#include <vector>

#include "echelon/cluster/cluster.h"
#include "echelon/cost/strategy.h"

namespace echelon {

/// The ranks that differ along pp alone. Without a pipeline: one rank.
struct PipelinePlace {
  int64_t first_rank = 0;
  int64_t data_index = 0;          // which data-parallel rank it belongs to
  std::vector<int64_t> groups;     // of the cluster, by pipeline rank
  std::vector<bool> next_in_node;  // by pipeline rank: so is the one after it
};

/// The first of each kind: those that differ in the groups of nodes below them,
/// in where nodes end between neighbours, or in the size of their microbatches.
std::vector<PipelinePlace>
distinct_pipelines(const Strategy& strategy, const Cluster& cluster);

/// All of them, in order of their first rank.
std::vector<PipelinePlace>
all_pipelines(const Strategy& strategy, const Cluster& cluster);

/// Samples of a microbatch on a data-parallel rank.
int64_t microbatch_of(const Strategy& strategy, int64_t data_index);

/// The strategy as data-parallel ranks with microbatches of this size see it:
/// as if all of them had it.
Strategy with_microbatch(const Strategy& strategy, int64_t samples);

}  // namespace echelon
