// What a job leaves to the cost model, on the ranks of the job.
#pragma once

#include <cstdio>

#include "echelon/comm/world.h"
#include "echelon/job/job.h"

namespace echelon {

/// The job with the way of context parallelism and the chunks of matmuls that
/// rank 0 chooses for all (predict/choices.h) and tells on `out`. Every rank
/// calls this, before it makes groups.
Job with_chosen_ways(Job job, World& world, std::FILE* out = stdout);

}  // namespace echelon
