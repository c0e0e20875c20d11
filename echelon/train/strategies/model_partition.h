// The partition of a job's list of layers into pipeline stages, or over the
// devices of one process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "echelon/comm/world.h"
#include "echelon/counting/layer_cost.h"
#include "echelon/job/job.h"
#include "echelon/layers/layer_list.h"
#include "echelon/layout/partition.h"
#include "echelon/schedule/schedule.h"
#include "echelon/train/strategies/parallel_model.h"

namespace echelon {

/// How a model's layers are divided, and by what.
struct ModelPartition {
  /// Stage i has layers boundaries[i] to boundaries[i + 1] - 1.
  std::vector<size_t> boundaries;
  std::vector<std::string> layers;  // names of all layers
  /// By layer, for one microbatch; those of tensor-parallel layers are of the
  /// first rank's shard, which is the largest.
  std::vector<counting::LayerCost> costs;
  std::vector<double> work;        // by layer: FLOPs, or measured seconds
  SliceMemory memory;              // of stages
  std::vector<std::string> lines;  // what each stage holds, for people
};

/// The stages of a pipeline, by [model] cut or balance. Memory counts what the
/// schedule stores. With balance = "measured" each tensor-parallel group times
/// the layers. Their ratios are those of the fastest, and the speed of a
/// pipeline rank is that of its slowest device in any pipeline: a stage on a
/// slow device has less work. Every rank of the world calls this.
///
/// Throws ConfigError when there is no such partition.
ModelPartition partition_into_stages(
    const Job& job, const ModelPlace& place, const Schedule& schedule);

/// The boundaries of the schedule's stages from the costs of one microbatch,
/// without a world: balance = "measured" counts operations instead.
std::vector<size_t> stage_boundaries(
    const Job& job, const Schedule& schedule,
    const std::vector<counting::LayerCost>& costs);

/// The speed of each stage's pipeline rank as a share of the fastest's. A
/// pipeline rank is as slow as its slowest device in any pipeline. Empty where
/// all are about as fast.
///
///   seconds  by rank of the world: what the same work takes
std::vector<double> stage_speeds(
    const Mesh& mesh, const Schedule& schedule,
    const std::vector<double>& seconds);

/// How many numbers of its state an optimizer keeps for each parameter.
int64_t optimizer_copies(const OptimizerOptions& options);

/// Balances the layers over slices by rank 0's times and returns the name of
/// the first layer of each slice but the first. Every rank of the world calls
/// this.
std::vector<std::string> measured_partition(
    const LayerList& layers, const std::vector<counting::TensorSpec>& inputs,
    size_t slices, World& world);

}  // namespace echelon
