// The folder that a run writes: made before ranks start, never lost by mistake.
#pragma once

#include <string>

#include "echelon/job/job.h"

namespace echelon {

/// Whether the run in [train] run goes on: it has checkpoints of its own, or
/// the same configuration was killed before the first of them, and neither
/// overwrite nor checkpoint.resume = "never" is set. Others that
/// checkpoint.resume names are what a run begins with: they count until it has
/// its own.
///
/// Throws ConfigError when the folder cannot be made: it is another run without
/// checkpoints (unless overwrite is set and it is a run folder: it has
/// config.toml, or is empty), overwrite would remove what the run is to begin
/// with (checkpoints, weights, data), checkpoint.resume names one of its own
/// that is not the newest, it is a file, or the disk does not let us write
/// there; CheckpointError when what checkpoint.resume names is no checkpoint,
/// or another process writes there. Changes nothing.
bool check_run_folder(const Job& job);

/// check_run_folder, then removes an older run of that name unless it goes on,
/// makes the folder and writes config.toml with all values as used, `overwrite`
/// = false, so that running it again destroys nothing. An older config.toml
/// stays until the new one is whole. Returns its path.
std::string make_run_folder(const Job& job);

}  // namespace echelon
