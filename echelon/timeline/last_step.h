// The step that the ranks of a run recorded last, while it trains: one file a
// rank (train/step_shots.h), of the ranks that a page shows.
#pragma once

#include <filesystem>
#include <optional>

#include "echelon/timeline/timeline.h"

namespace echelon::timeline {

/// RUN/last_step/: the step that the first rank has, of the ranks that have the
/// same one. Ranks write at nearly the same time, and one that is late is left
/// out. Nothing where there is none. Throws DataError for a file that cannot be
/// read.
std::optional<Timeline> read_last_step(const std::filesystem::path& run);

}  // namespace echelon::timeline
