// Finds what is wrong with a job before a rank starts.
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
  int64_t num_parameters = 0;  // numbers of the model
  int64_t num_trained = 0;     // of them, and not frozen
  int64_t num_saved = 0;       // of them, and in checkpoints
  /// find_unused_settings() and other warnings, one line each.
  std::vector<std::string> warnings;
};

/// Checks every rule that ties settings to each other, to the number of ranks
/// and to the files they name. Reads folders, headers and targets, not samples.
/// Throws ConfigError or DataError: place, values, rule, way out; five lines.
JobFacts check_job(const Job& job, int64_t num_ranks);
/// The same with known facts about the data, whose files are not read.
JobFacts check_job(const Job& job, int64_t num_ranks, const DataFacts& data);

/// Checks that the ranks of job.layout can continue a text together, as
/// `echelon sample` does: along cp and tp alone, with a token and heads for
/// each. Reads no files. Throws ConfigError.
void check_sampling(const Job& job);

/// The settings that this job's choice of model, data, optimizer … ignores,
/// although they differ from the default: place, key and why, a line each.
std::vector<std::string> find_unused_settings(const Job& job);

}  // namespace echelon
