#include "echelon/parallel/pipeline/pipeline_stage.h"

#include <torch/nn/module.h>

#include <unordered_set>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {

std::vector<std::pair<std::string, torch::Tensor>>
PipelineStage::named_parameters() const {
  std::vector<std::pair<std::string, torch::Tensor>> all;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& [name, layer] : layers) {
    if (!layer.module) continue;
    for (const auto& item : layer.module->named_parameters()) {
      if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
      all.emplace_back(name + "." + item.key(), item.value());
    }
  }
  return all;
}

PipelineStage stage_of(const Network& network, int32_t stage) {
  PipelineStage built{.stage = stage};
  for (const auto& layer : network.layers()) {
    built.layers.push_back({layer.name, {layer.module, layer.forward}});
  }
  return built;
}

PipelineStage build_stage(
    const LayerList& list, int32_t stage, size_t begin, size_t end,
    std::optional<uint64_t> seed) {
  if (seed) return stage_of(*build_network(list, begin, end, *seed), stage);
  PipelineStage built{.stage = stage};
  for (size_t i = begin; i < end; ++i) {
    built.layers.push_back({list[i].name, list[i].build()});
  }
  return built;
}

std::vector<size_t>
partition_evenly(const LayerList& list, int32_t num_stages) {
  const auto stages = static_cast<size_t>(num_stages);
  if (num_stages < 1 || list.size() < stages) {
    throw ConfigError(format(
        "{} pipeline stages for a model of {} layers; every stage needs one: "
        "use at most {} stages",
        num_stages, list.size(), list.size()));
  }
  std::vector<size_t> bounds;
  for (size_t i = 0; i <= stages; ++i) {
    bounds.push_back(list.size() * i / stages);
  }
  return bounds;
}

std::vector<PipelineStage> build_stages(
    const LayerList& list, const std::vector<size_t>& bounds,
    const std::vector<int32_t>& rank_of_stage, int32_t rank,
    std::optional<uint64_t> seed) {
  std::vector<PipelineStage> stages;
  for (size_t stage = 0; stage < rank_of_stage.size(); ++stage) {
    if (rank_of_stage[stage] != rank) continue;
    stages.push_back(build_stage(
        list, static_cast<int32_t>(stage), bounds.at(stage),
        bounds.at(stage + 1), seed));
  }
  return stages;
}

}  // namespace echelon
