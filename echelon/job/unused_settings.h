// Settings that a job has for nothing.
#pragma once

#include <string>
#include <vector>

#include "echelon/job/job.h"

namespace echelon {

/// The settings that this job's choice of model, data, optimizer … ignores,
/// though they differ from the default: place, key and why, a line each.
std::vector<std::string> find_unused_settings(const Job& job);

}  // namespace echelon
