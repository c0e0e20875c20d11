// The layers that one stage of a pipeline computes.
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "echelon/layers/layer_list.h"
#include "echelon/layers/network.h"

namespace echelon {

struct PipelineLayer {
  std::string name;
  BuiltLayer layer;
};

/// A stage on the rank that the schedule assigns it to.
struct PipelineStage {
  int32_t stage = 0;
  std::vector<PipelineLayer> layers;

  /// ("layer.parameter", tensor) in order; a tensor that layers share once.
  std::vector<std::pair<std::string, torch::Tensor>> named_parameters() const;
};

/// The layers of a network as a stage, which shares their modules.
PipelineStage stage_of(const Network& network, int32_t stage);

/// Builds layers [begin, end) of `list`. With a seed, parameters and ties
/// within the stage are initialised as by build_network (layers/network.h), so
/// they do not depend on the partition. Without one, parameters are as the
/// layers' `build` leaves them, to be overwritten.
PipelineStage build_stage(
    const LayerList& list, int32_t stage, size_t begin, size_t end,
    std::optional<uint64_t> seed = std::nullopt);

/// Partitions the layers into `num_stages` slices of nearly equal numbers of
/// layers: returns where each stage begins, and the end. Throws ConfigError for
/// more stages than layers.
std::vector<size_t> partition_evenly(const LayerList& list, int32_t num_stages);

/// Builds the stages of `rank`. Stage i has the layers [bounds[i], bounds[i +
/// 1]).
std::vector<PipelineStage> build_stages(
    const LayerList& list, const std::vector<size_t>& bounds,
    const std::vector<int32_t>& rank_of_stage, int32_t rank,
    std::optional<uint64_t> seed = std::nullopt);

}  // namespace echelon
