// The folder that a run writes: made before ranks start, never lost by mistake,
// and read for the configuration that the run was trained with.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "echelon/checkpoint/files/folder.h"
#include "echelon/job/job.h"

namespace echelon {

/// Whether the run in [train] run resumes: it has checkpoints of its own, or
/// the same configuration was killed before the first of them, and neither
/// overwrite nor checkpoint.resume = "never" is set. Checkpoints of other runs
/// that checkpoint.resume names only count until the run has its own.
///
/// Throws ConfigError when the folder cannot be made:
/// - it is another run without checkpoints, unless overwrite is set;
/// - overwrite is set, or it has no checkpoints, and its config.toml is not as
///   this version writes it: it may be a user's;
/// - overwrite would remove what the run starts from (checkpoints, weights,
///   data);
/// - checkpoint.resume names one of its own checkpoints, but not the newest;
/// - it is a file, or cannot be written;
/// - checkpoint.remote does not answer, or refuses what a run does there.
/// Throws CheckpointError when checkpoint.resume names no checkpoint, or
/// another process writes to the folder. Changes nothing.
bool check_run_folder(const Job& job);

/// A run's folder. No other run writes there while the lock exists.
struct RunFolder {
  std::string configuration;  // the path of its config.toml
  std::unique_ptr<CheckpointLock> lock;
};

/// Calls check_run_folder, makes the folder and locks it, removes the files of
/// an older run of that name unless it resumes, and writes config.toml with all
/// values as used. What is there is read again under the lock. Files that no
/// run writes stay. `overwrite` is false in config.toml, so that running it
/// again destroys nothing. An older config.toml is replaced only when the new
/// one is complete. Then it fetches the newest checkpoint of checkpoint.remote,
/// if that is newer than the folder's, or removes those there (overwrite); and
/// copies what checkpoint.resume names on object storage into the user's cache,
/// where the run has no checkpoints of its own.
///
/// The launcher of a job calls this, or else its rank 0, and keeps the result
/// until the job ends. Throws what check_run_folder does.
RunFolder make_run_folder(const Job& job);

/// Writes the job as `folder`/config.toml, as make_run_folder does, and returns
/// its path. Throws ConfigError when it cannot be written.
std::string
write_configuration(const Job& job, const std::filesystem::path& folder);

/// The name of the file in a run's folder that says with which layout its job
/// was started, where `echelon job resize` has changed that of config.toml.
inline constexpr const char* kFirstLayout = "first_layout";

/// The configuration behind the weights of WeightsSource(place): from the
/// newest checkpoint's manifest, or from config.toml for a run without
/// checkpoints (last_weights()).
///
/// Throws CheckpointError when `place` is neither a run nor a checkpoint, and
/// what load_job throws.
Job trained_job(const std::string& place);

}  // namespace echelon
