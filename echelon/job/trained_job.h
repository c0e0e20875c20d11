// The configuration that a run or a checkpoint was trained with. Free of
// LibTorch.
#pragma once

#include <string>

#include "echelon/job/job.h"

namespace echelon {

/// The configuration behind the weights of WeightsSource(place): from the
/// newest checkpoint's manifest, or from config.toml for a run without
/// checkpoints (last_weights()).
///
/// Throws CheckpointError when `place` is neither a run nor a checkpoint, and
/// what load_job throws.
Job trained_job(const std::string& place);

}  // namespace echelon
