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

/// A stage that exists, on the rank that the schedule puts it on.
struct PipelineStage {
  int32_t stage = 0;
  std::vector<PipelineLayer> layers;

  /// ("layer.parameter", tensor), in order; a tensor of two layers once.
  std::vector<std::pair<std::string, torch::Tensor>> named_parameters() const;
};

/// The layers of a network as a stage: what it holds, it shares.
PipelineStage stage_of(const Network& network, int32_t stage);

/// Builds layers [begin, end) of `list`. With a seed, first values and ties
/// within the stage are those of build_network (models/network.h), so they do
/// not depend on the cut; without, they are what the layers' `build` leaves,
/// for values to come.
PipelineStage build_stage(
    const LayerList& list, int32_t stage, size_t begin, size_t end,
    std::optional<uint64_t> seed = std::nullopt);

/// Where each stage begins, and the end: `num_stages` slices of as equal a
/// number of layers as possible. Throws ConfigError for more stages than
/// layers.
std::vector<size_t> cut_evenly(const LayerList& list, int32_t num_stages);

/// Builds the stages that lie on `rank`; stage i holds the layers
/// [cuts[i], cuts[i + 1]).
std::vector<PipelineStage> build_stages(
    const LayerList& list, const std::vector<size_t>& cuts,
    const std::vector<int32_t>& rank_of_stage, int32_t rank,
    std::optional<uint64_t> seed = std::nullopt);

}  // namespace echelon
