// Which devices a job gets, once it is decided how many.
#pragma once

#include <cstdint>
#include <vector>

#include "echelon/pool/decide.h"

namespace echelon::pool {

/// The devices of each job of `state` when it has counts[job] of them. A job
/// that keeps its number keeps its devices; one that shrinks keeps those of the
/// groups in which it has most. One that starts takes the first group that has
/// room for all of it, else the emptiest groups. Counts fit the usable devices,
/// and a job with unusable devices has a smaller count, or 0.
std::vector<std::vector<int>>
place(const State& state, const std::vector<int64_t>& counts);

}  // namespace echelon::pool
