// What a configuration asks for, in the terms of cost and simulator.
#pragma once

#include "echelon/cost/model_shape.h"
#include "echelon/cost/strategy.h"
#include "echelon/job/check_job.h"

namespace echelon {

struct Configured {
  ModelShape model;
  Strategy strategy;
};

/// `facts` are check_job's of it. Throws ConfigError for a model whose cost is
/// not known, and for a schedule from a file.
Configured configured(const Job& job, const JobFacts& facts);

/// The strategy alone, of any network. Throws ConfigError for a schedule from a
/// file.
Strategy configured_strategy(const Job& job);

}  // namespace echelon
