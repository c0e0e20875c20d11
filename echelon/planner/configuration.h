// Writes a plan as a configuration for `echelon train`.
#pragma once

#include <string>

#include "echelon/planner/plan.h"

namespace echelon::planner {

/// The tables of a configuration for `echelon train`: [model] (for gpt and
/// llama shapes and the image networks; others get a comment), [layout],
/// [shard], [memory], [precision] and the batch of [train]. Comments stand for
/// data, steps and the optimizer's numbers, which the user chooses.
std::string to_configuration(const Plan& plan, const PlanRequest& request);

/// Whether `echelon train` has a model of this shape.
bool is_trained_here(const cost::ModelShape& model);

}  // namespace echelon::planner
