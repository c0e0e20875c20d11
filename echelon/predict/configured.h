// A configuration in the terms of the cost model and the simulator.
#pragma once

#include "echelon/cost/model_shape.h"
#include "echelon/cost/strategy.h"
#include "echelon/job/check_job.h"

namespace echelon::predict {

struct Configured {
  cost::ModelShape model;
  cost::Strategy strategy;
};

/// `facts` are what check_job returned for it. Throws ConfigError for a model
/// whose cost is not known, and for a schedule from a file.
Configured configured(const Job& job, const JobFacts& facts);

/// The strategy alone, for any network. Throws ConfigError for a schedule from
/// a file.
cost::Strategy configured_strategy(const Job& job);

}  // namespace echelon::predict
