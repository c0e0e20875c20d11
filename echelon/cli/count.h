// The layers of a configuration, counted by echelon-train, which has every
// network and loads the library of one's own.
#pragma once

#include "echelon/cost/model_shape.h"
#include "echelon/job/job.h"

namespace echelon::cli {

/// Whether formulas say nothing of its layers: a library has the model, or the
/// data that says the shape of a sample.
bool is_counted_alone(const Job& job);

/// What the devices of the job would run, on processors or on GPUs. Throws
/// ConfigError with what echelon-train says.
cost::ModelShape count_layers(Job job, bool on_processor);

}  // namespace echelon::cli
