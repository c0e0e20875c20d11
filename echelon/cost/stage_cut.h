// The partition of models into pipeline stages.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/cost/model_shape.h"
#include "echelon/cost/strategy.h"

namespace echelon {

/// The strategy's, or the schedule's default; 1 without a pipeline.
int64_t stages_per_rank(const Strategy& strategy);
/// pp * stages_per_rank.
int64_t num_stages(const Strategy& strategy);

/// Stages go down the pipeline and up again: zb-v and dualpipev.
bool is_v_shaped(const std::string& schedule);
/// Whether one rank has the first and the last stage, so that tied weights are
/// one tensor: without a pipeline, or in a v-shaped one.
bool ends_on_one_rank(const Strategy& strategy);

/// Blocks (of counted models: layers) of each stage: the strategy's, otherwise
/// by the rules below.
std::vector<int64_t>
stage_layers(const ModelShape& model, const Strategy& strategy);

/// Blocks of each stage, spread evenly; the remainder goes to the stages in the
/// middle, which have neither embedding nor head.
std::vector<int64_t> blocks_of_stages(int64_t blocks, int64_t stages);

/// Layers of each stage by their FLOPs: a stage ends where its share does, and
/// has at least one layer. `counted`: the stage that each layer was counted
/// for, which is used if there are as many stages, in order.
std::vector<int64_t> layers_of_stages(
    const std::vector<double>& flops, int64_t stages,
    const std::vector<int64_t>& counted = {});
/// The same of the model's layers.
std::vector<int64_t> layers_of_stages(const ModelShape& model, int64_t stages);
/// The same in proportion to the stages' weights.
std::vector<int64_t> layers_by_weight(
    const std::vector<double>& flops, const std::vector<double>& weights);
std::vector<double> flops_of_layers(const ModelShape& model);

}  // namespace echelon
