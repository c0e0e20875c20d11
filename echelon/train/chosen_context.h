// [layout] context = "auto" on the ranks of a job.
#pragma once

#include <cstdio>

#include "echelon/comm/world.h"
#include "echelon/job/job.h"

namespace echelon {

/// The job with the way of context parallelism that rank 0 chooses for all
/// (predict/context.h) and tells on `out`. Every rank calls this, before it
/// makes groups.
Job with_chosen_context(Job job, World& world, std::FILE* out = stdout);

}  // namespace echelon
