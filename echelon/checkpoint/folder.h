// The folder of a run's checkpoints: whole ones alone are seen in it, whatever
// happens while one is written. Free of LibTorch.
//
//   checkpoints/
//     LATEST                 the name of the newest one
//     LOCK                   who writes here
//     step-00000100/         a checkpoint: manifest.json and files
//     .step-00000200.partial one that is being written, or debris of a crash
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "echelon/checkpoint/manifest.h"

namespace echelon {

/// A whole checkpoint.
struct CheckpointPlace {
  std::filesystem::path path;
  int64_t step = 0;
};

/// Where the checkpoint of a step is, and where it is while it is written.
std::filesystem::path
checkpoint_path(const std::filesystem::path& folder, int64_t step);
std::filesystem::path
partial_checkpoint(const std::filesystem::path& folder, int64_t step);

/// All of them, the newest (by step) first. Empty when there is no such folder.
/// Those whose name or manifest is missing are no checkpoints; nothing is read.
std::vector<CheckpointPlace>
list_checkpoints(const std::filesystem::path& folder);

/// The one that LATEST names, else the newest.
std::optional<CheckpointPlace>
latest_checkpoint(const std::filesystem::path& folder);

/// Where a path of a user's leads: a checkpoint itself, a folder of checkpoints, or
/// a run's folder (RUN/checkpoints): the checkpoints there, in the order in which to
/// try them. Throws CheckpointError, saying what it is instead, when there is none.
std::vector<CheckpointPlace>
find_checkpoints(const std::filesystem::path& path);

/// The right to write into the folder: one process has it (flock on LOCK, which
/// names host, process and start). Made by the job's rank 0 alone; others of its
/// ranks write with its permission.
class CheckpointLock {
 public:
  /// Makes the folder. Throws CheckpointError that names the owner.
  explicit CheckpointLock(const std::filesystem::path& folder);
  ~CheckpointLock();
  CheckpointLock(const CheckpointLock&) = delete;
  CheckpointLock& operator=(const CheckpointLock&) = delete;

 private:
  int file_ = -1;
};

/// Which checkpoints stay.
struct KeepRule {
  int64_t newest = 2;           // at least 2
  /// Also the best by this metric of their manifests; empty: none.
  std::string best;
  bool best_is_largest = false;
};

/// Removes what crashes left, of any step, and makes an empty folder for the files
/// of `step`: its path. Throws CheckpointError when a checkpoint of that step is
/// there already, or the disk does not let us.
///
///   needed_bytes  of all ranks' files: refused, with both figures, when the disk
///                 has not so much left
std::filesystem::path begin_checkpoint(
    const std::filesystem::path& folder, int64_t step, int64_t needed_bytes);

/// After every rank has written its file and part: reads the parts of `ranks` ranks,
/// writes the manifest, synchronises files and folders, renames, sets LATEST. The
/// checkpoint's path. After a throw (CheckpointError) it is not there.
std::filesystem::path commit_checkpoint(
    const std::filesystem::path& folder,
    CheckpointManifest manifest,
    int64_t ranks);

/// Removes the folder of a checkpoint that could not be finished. Throws nothing.
void abandon_checkpoint(const std::filesystem::path& folder, int64_t step);

/// Removes checkpoints that need not stay. Throws CheckpointError.
void keep_checkpoints(
    const std::filesystem::path& folder, const KeepRule& rule);

}  // namespace echelon
