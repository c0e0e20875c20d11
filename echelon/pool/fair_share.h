// How many devices each project is entitled to.
#pragma once

#include <cstdint>
#include <vector>

#include "echelon/pool/decide.h"

namespace echelon::pool {

/// The fair share of each project, parents included, when the projects without
/// children ask for `requested` devices: first min(guaranteed, requested), then
/// one device after another to the project with the fewest of these for its
/// weight. Never above a limit or the number of usable devices.
std::vector<int64_t>
fair_shares(const State& state, std::vector<int64_t> requested);

}  // namespace echelon::pool
