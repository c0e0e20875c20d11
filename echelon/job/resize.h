// The layout of a job on another number of ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "echelon/data/sources/inspect.h"
#include "echelon/job/job.h"
#include "echelon/layout/layout.h"

namespace echelon {

/// The job's layout on `num_ranks` ranks. Global batch, order of samples and
/// learning rate are the job's, so that training computes the same.
///
/// Of the layouts that check_job() accepts, it is the one that changes least:
/// first only the number of data-parallel ranks, then the fewest other axes,
/// then the one with the fewest pipeline stages. An axis that the job does not
/// use is not added, other than data parallelism. Reads no data: `data` has the
/// facts of check_job().
///
/// Throws ConfigError when there is none, with the numbers near to it that have
/// one.
Layout layout_on(const Job& job, int64_t num_ranks, const DataFacts& data);

/// All layouts of dp, fsdp, tp and pp that check_job() accepts, the one that
/// changes least first, also with axes that the job does not use. Empty when
/// there is none.
std::vector<Layout>
layouts_on(const Job& job, int64_t num_ranks, const DataFacts& data);

}  // namespace echelon
