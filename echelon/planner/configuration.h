// A plan as what `echelon train` reads.
#pragma once

#include <string>

#include "echelon/planner/plan.h"

namespace echelon {

/// The tables of a configuration that `echelon train` takes: [model] (for gpt
/// and llama shapes and the image networks; a comment says so of others),
/// [layout], [shard], [memory], [precision] and the batch of [train]. Data,
/// steps and the optimizer's numbers are the user's: comments stand for them.
std::string to_configuration(const Plan& plan, const PlanRequest& request);

/// Whether `echelon train` has a model of this shape.
bool is_trained_here(const ModelShape& model);

}  // namespace echelon
