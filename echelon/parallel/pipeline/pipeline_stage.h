// The layers that one stage of a pipeline computes.
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "echelon/models/layer_list.h"

namespace echelon {

struct PipelineLayer {
  std::string name;
  BuiltLayer layer;
};

/// A stage that exists, on the rank that the schedule puts it on.
struct PipelineStage {
  int32_t stage = 0;
  std::vector<PipelineLayer> layers;

  /// ("layer.parameter", tensor), in order.
  std::vector<std::pair<std::string, torch::Tensor>> named_parameters() const;
};

/// Builds layers [begin, end) of `list`.
PipelineStage
build_stage(const LayerList& list, int32_t stage, size_t begin, size_t end);

/// Where each stage begins, and the end: `num_stages` slices of as equal a
/// number of layers as possible. Throws ConfigError for more stages than
/// layers.
std::vector<size_t> cut_evenly(const LayerList& list, int32_t num_stages);

/// Builds the stages that lie on `rank`; stage i holds the layers
/// [cuts[i], cuts[i + 1]).
std::vector<PipelineStage> build_stages(
    const LayerList& list,
    const std::vector<size_t>& cuts,
    const std::vector<int32_t>& rank_of_stage,
    int32_t rank);

}  // namespace echelon
