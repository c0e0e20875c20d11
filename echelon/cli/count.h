// The layers of a configuration, counted by echelon-train, which has every
// network and loads the library of one's own.
#pragma once

#include "echelon/cost/model_shape.h"
#include "echelon/job/check_job.h"
#include "echelon/job/job.h"

namespace echelon::cli {

/// Whether formulas say nothing of its layers: a library has the model, or the
/// data that says the shape of a sample.
bool is_counted_alone(const Job& job);

/// What the devices of the job would run, on processors or on GPUs. Throws
/// ConfigError with what echelon-train says.
cost::ModelShape count_layers(Job job, bool on_processor);

/// Sets the numbers of parameters of a library's model, which loads the library
/// in a process of its own; does nothing for a model that is built in. Where
/// its layers cannot be counted, it warns on stderr and leaves them at 0.
void count_own_parameters(Job job, JobFacts& facts);

}  // namespace echelon::cli
