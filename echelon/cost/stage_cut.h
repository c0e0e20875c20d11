// Where models are cut into pipeline stages.
#pragma once

#include <cstdint>
#include <vector>

#include "echelon/cost/model_shape.h"
#include "echelon/cost/strategy.h"

namespace echelon {

/// What the strategy says, or its schedule takes; 1 without a pipeline.
int64_t stages_per_rank(const Strategy& strategy);
/// pp * stages_per_rank.
int64_t num_stages(const Strategy& strategy);

/// Stages go down the pipeline and up again: zb-v and dualpipev.
bool is_v_shaped(const Strategy& strategy);
/// The first and the last stage are one rank's, and tied weights one tensor:
/// without a pipeline, or in a v-shaped one.
bool ends_on_one_rank(const Strategy& strategy);

/// Blocks (of counted models: layers) of each stage: what the strategy says,
/// else by the rules below.
std::vector<int64_t>
stage_layers(const ModelShape& model, const Strategy& strategy);

/// Blocks of each stage: as many each; those that are left over go to the
/// stages in the middle, which have neither embedding nor head.
std::vector<int64_t> blocks_of_stages(int64_t blocks, int64_t stages);

/// Layers of each stage by what each layer computes: a stage ends where its
/// share does, and each has one or more. `counted`: the stage that each layer
/// was counted for, which is taken when they are that many stages, in order.
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
