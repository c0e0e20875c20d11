// Where a job's list of layers is cut, and what each slice holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "echelon/comm/world.h"
#include "echelon/counting/layer_cost.h"
#include "echelon/job/job.h"
#include "echelon/layers/layer_list.h"
#include "echelon/schedule/schedule.h"
#include "echelon/train/strategies/parallel_model.h"

namespace echelon {

struct ModelCut {
  std::vector<size_t>
      boundaries;  // slice i: layers boundaries[i] up to [i + 1]
  std::vector<std::string> layers;  // names, of the whole model
  /// By layer, for one microbatch; of layers that are cut over tensor-parallel
  /// ranks those of the first one's part, which is the largest.
  std::vector<LayerCost> costs;
  std::vector<std::string> lines;  // what each slice holds, for people
};

/// The stages of a pipeline, by [model] cut or balance. Memory counts what the
/// schedule stores. With balance = "measured" rank 0 times the layers, together
/// with the ranks that compute them with it, and the others take its result.
/// Every rank of the world calls this.
///
/// Throws ConfigError for what cannot be cut so.
ModelCut cut_into_stages(
    const Job& job, const ModelPlace& place, const Schedule& schedule);

/// The boundaries of the schedule's stages by the costs of one microbatch
/// alone, without a world: balance = "measured" counts operations.
std::vector<size_t> stage_boundaries(
    const Job& job, const Schedule& schedule,
    const std::vector<LayerCost>& costs);

/// The first layers of all slices but the first, balanced by rank 0's times.
/// Every rank of the world calls this.
std::vector<std::string> measured_cut(
    const LayerList& layers, const std::vector<TensorSpec>& inputs,
    size_t slices, World& world);

/// Seconds of forward and backward of each layer on `device`, the shortest of a
/// few runs of a random microbatch. Builds one layer at a time.
std::vector<double> time_layers(
    const LayerList& layers, const std::vector<TensorSpec>& inputs,
    torch::Device device);

/// Bytes of parameters, their gradients and the optimizer's state.
int64_t state_bytes(
    const LayerCost& layer, const std::string& optimizer, bool momentum);

}  // namespace echelon
