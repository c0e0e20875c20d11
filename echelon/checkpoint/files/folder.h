// The folder of a run's checkpoints. Readers see complete checkpoints only,
// whatever happens while one is written. Free of LibTorch.
//
//   checkpoints/
//     LATEST                 the name of the newest one
//     .LATEST.new            the next name, while a checkpoint gets its own
//     LOCK                   who writes here
//     step-00000100/         a checkpoint: manifest.json and files
//     .step-00000200.partial one that is being written, or debris of a crash
//     .step-00000050.removed one that is being removed, or debris of that
//     damaged-step-00000150/ one that was set aside, no longer a checkpoint
//
// A rename makes a folder a checkpoint, after everything in it is on disk.
// .LATEST.new is written before that rename and becomes LATEST after it: a
// crash in between leaves a name of a complete checkpoint, and readers follow
// it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "echelon/checkpoint/format/manifest.h"

namespace echelon {

/// A complete checkpoint.
struct CheckpointPlace {
  std::filesystem::path path;
  int64_t step = 0;
};

/// The path of a step's checkpoint, and its path while it is written.
std::filesystem::path
checkpoint_path(const std::filesystem::path& folder, int64_t step);
std::filesystem::path
partial_checkpoint(const std::filesystem::path& folder, int64_t step);

/// All checkpoints, the newest (by step) first. Empty when there is no such
/// folder. A folder with another name or without a manifest is no checkpoint;
/// nothing is read. Throws CheckpointError when the folder cannot be read.
std::vector<CheckpointPlace>
list_checkpoints(const std::filesystem::path& folder);

/// The entries with a checkpoint's name and without a manifest, the newest
/// first. No run leaves one: somebody removed or copied files.
std::vector<CheckpointPlace>
list_incomplete(const std::filesystem::path& folder);

/// The checkpoint that LATEST names (.LATEST.new, when a crash left it and its
/// checkpoint exists), else the newest.
std::optional<CheckpointPlace>
latest_checkpoint(const std::filesystem::path& folder);

/// The checkpoints that a user's path leads to, in the order to try them: the
/// latest, then the others, the newest first. The path is a checkpoint, a
/// folder of checkpoints, or a run's folder (RUN/checkpoints). A path that may
/// be s3://… first goes through local_checkpoint() (checkpoint/remote). Throws
/// CheckpointError, which says what the path is instead, when there is none.
std::vector<CheckpointPlace>
find_checkpoints(const std::filesystem::path& path);

/// Everything else there: files of running saves and of crashes (names with a
/// leading dot), and what was set aside.
std::vector<std::filesystem::path>
list_others(const std::filesystem::path& folder);

/// The right to write into the folder, which one process has at a time: a flock
/// on LOCK, which names host, process and start time. It ends with the process.
/// Only rank 0 of a job makes one; the other ranks write with its permission.
/// All functions below require it. A run's folder has such a lock too
/// (job/run_folder.h).
class CheckpointLock {
 public:
  /// Makes the folder. Throws CheckpointError that names the owner, or says why
  /// the file system gives no lock. `waits`: for an owner that was killed and
  /// may need two seconds to end.
  explicit CheckpointLock(
      const std::filesystem::path& folder, bool waits = true);
  ~CheckpointLock();
  CheckpointLock(const CheckpointLock&) = delete;
  CheckpointLock& operator=(const CheckpointLock&) = delete;

 private:
  int file_ = -1;
};

/// Throws what CheckpointLock does while another process has the lock of
/// `folder`, which need not exist. Changes nothing.
void check_unlocked(const std::filesystem::path& folder);

/// Which checkpoints are kept.
struct KeepRule {
  int64_t newest = 2;  // at least 2
  /// Also the best by this metric of their manifests; empty: none.
  std::string best;
  bool best_is_largest = false;
};

/// Removes what crashes left, of any step, makes an empty folder for the files
/// of `step`, and returns its path. Throws CheckpointError when that step has a
/// checkpoint already (set_aside moves a damaged one away), and for errors of
/// the disk.
///
///   needed_bytes  of all ranks' files; throws when the disk has less left
std::filesystem::path begin_checkpoint(
    const std::filesystem::path& folder, int64_t step, int64_t needed_bytes);

/// Call it after every rank has written its file and part: reads the parts of
/// `ranks` ranks, writes the manifest, syncs files and folders, renames, sets
/// LATEST, and returns the checkpoint's path. After a CheckpointError neither
/// the checkpoint nor its files exist.
std::filesystem::path commit_checkpoint(
    const std::filesystem::path& folder, CheckpointManifest manifest,
    int64_t ranks);

/// The same for a checkpoint that was copied, with its manifest, into the
/// folder of begin_checkpoint().
std::filesystem::path
adopt_checkpoint(const std::filesystem::path& folder, int64_t step);

/// Removes the folder of a checkpoint that could not be finished. Never throws.
void abandon_checkpoint(const std::filesystem::path& folder, int64_t step);

/// Removes the checkpoints that the rule does not keep, and returns them. The
/// latest always stays and, if the rule has a `best`, so does one whose
/// manifest cannot be read. After a CheckpointError some may be left, each
/// complete.
std::vector<CheckpointPlace>
keep_checkpoints(const std::filesystem::path& folder, const KeepRule& rule);

/// Moves a damaged checkpoint away, so that training can save its step again.
/// It stays under the returned path, to be looked at, but is no checkpoint any
/// more. Throws CheckpointError.
std::filesystem::path set_aside(const CheckpointPlace& checkpoint);

}  // namespace echelon
