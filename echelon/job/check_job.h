// What can be known to be wrong with a job before a rank starts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/data/sources/inspect.h"
#include "echelon/job/job.h"

namespace echelon {

struct JobFacts {
  DataFacts data;
  int64_t classes = 0;         // outputs of the model
  int64_t steps = 0;           // of the whole run; epochs counted in steps
  int64_t num_parameters = 0;  // trained numbers of the model
  /// Settings that have no effect, one line each, to be printed once.
  std::vector<std::string> warnings;
};

/// Every rule that ties settings to each other, to the number of ranks and to
/// the files they name. Reads folders, headers and targets, not samples.
/// Throws ConfigError or DataError: place, values, rule, way out; five lines.
JobFacts check_job(const Job& job, int64_t num_ranks);
/// The same of data that was looked at before, or that nobody has: its files
/// are left alone.
JobFacts check_job(const Job& job, int64_t num_ranks, const DataFacts& data);

}  // namespace echelon
