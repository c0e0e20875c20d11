// What a model was trained by: the configuration of a run or a checkpoint. Free
// of LibTorch.
#pragma once

#include <string>

#include "echelon/job/job.h"

namespace echelon {

/// Of the weights that WeightsSource(place) has: as the newest checkpoint's
/// manifest says, of a run without checkpoints (last_weights()) as its
/// config.toml does.
///
/// Throws CheckpointError when `place` leads to neither, and what load_job
/// throws.
Job trained_job(const std::string& place);

}  // namespace echelon
