// The folder that a run writes: made before ranks start, never lost by mistake.
#pragma once

#include <string>

#include "echelon/train/job.h"

namespace echelon {

/// Throws ConfigError when [train] run cannot be made: it exists (unless
/// overwrite is set and it is a run folder: it has config.toml, or is empty),
/// it is a file, or the disk does not let us write there. Changes nothing.
void check_run_folder(const Job& job);

/// check_run_folder, then removes an older run of that name, makes the folder
/// and writes config.toml with all values as used, `overwrite` = false, so that
/// running it again destroys nothing. Returns the path of config.toml.
std::string make_run_folder(const Job& job);

}  // namespace echelon
