// What a job leaves to the cost model: [layout] context = "auto" and
// overlap_chunks = 0.
#pragma once

#include <cstdint>

#include "echelon/cost/choices.h"
#include "echelon/cost/context_way.h"
#include "echelon/job/job.h"

namespace echelon::predict {

/// cost::choose_context_way() for a job on this machine, or on hosts like it
/// with `ranks_per_host` each. Its rates are those of `echelon bench --save`,
/// else of the catalogue, else guesses. `why` is one line for people, "context:
/// ring: …". Models whose cost is not known take the ring. Hosts may have been
/// measured differently: one rank asks for all.
cost::ContextWayChoice
choose_context(const Job& job, int64_t ranks_per_host, bool on_processor);

/// cost::choose_product_chunks() likewise; `why` is "overlap_chunks: 4: …".
/// Models whose cost is not known take 1.
cost::ProductChunksChoice
choose_chunks(const Job& job, int64_t ranks_per_host, bool on_processor);

}  // namespace echelon::predict
