// The folder of a run's checkpoints: whole ones alone are seen in it, whatever
// happens while one is written. Free of LibTorch.
//
//   checkpoints/
//     LATEST                 the name of the newest one
//     .LATEST.new            the next name, while a checkpoint gets its own
//     LOCK                   who writes here
//     step-00000100/         a checkpoint: manifest.json and files
//     .step-00000200.partial one that is being written, or debris of a crash
//     .step-00000050.removed one that is being removed, or debris of that
//     damaged-step-00000150/ one that was set aside: no checkpoint any more
//
// A checkpoint becomes one by a rename, after all that is in it lies on the
// disk. .LATEST.new is written before that rename and becomes LATEST after it:
// a crash in between leaves a name that leads to a whole checkpoint, and
// readers follow it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "echelon/checkpoint/format/manifest.h"

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
/// Throws CheckpointError when the folder cannot be read.
std::vector<CheckpointPlace>
list_checkpoints(const std::filesystem::path& folder);

/// The one that LATEST names (.LATEST.new, when a crash left that and its
/// checkpoint is there), else the newest.
std::optional<CheckpointPlace>
latest_checkpoint(const std::filesystem::path& folder);

/// Where a path of a user's leads: a checkpoint itself, a folder of
/// checkpoints, or a run's folder (RUN/checkpoints): the checkpoints there, in
/// the order in which to try them: the latest, then the others, the newest
/// first. Throws CheckpointError, saying what it is instead, when there is
/// none.
std::vector<CheckpointPlace>
find_checkpoints(const std::filesystem::path& path);

/// What else lies there: of saves under way and of crashes (names with a dot in
/// front), and what was set aside.
std::vector<std::filesystem::path>
list_others(const std::filesystem::path& folder);

/// The right to write into the folder: one process has it (flock on LOCK, which
/// names host, process and since when). Who dies has it no longer, at once.
/// Made by the job's rank 0 alone; others of its ranks write with its
/// permission. All that follows here is for who has it.
class CheckpointLock {
 public:
  /// Makes the folder. Throws CheckpointError that names the owner, or says why
  /// the file system gives no lock.
  explicit CheckpointLock(const std::filesystem::path& folder);
  ~CheckpointLock();
  CheckpointLock(const CheckpointLock&) = delete;
  CheckpointLock& operator=(const CheckpointLock&) = delete;

 private:
  int file_ = -1;
};

/// Which checkpoints stay.
struct KeepRule {
  int64_t newest = 2;  // at least 2
  /// Also the best by this metric of their manifests; empty: none.
  std::string best;
  bool best_is_largest = false;
};

/// Removes what crashes left, of any step, and makes an empty folder for the
/// files of `step`: its path. Throws CheckpointError when a checkpoint of that
/// step is there already (a damaged one makes room by set_aside), or the disk
/// does not let us.
///
///   needed_bytes  of all ranks' files: refused, with both figures, when the
///   disk
///                 has not so much left
std::filesystem::path begin_checkpoint(
    const std::filesystem::path& folder, int64_t step, int64_t needed_bytes);

/// After every rank has written its file and part: reads the parts of `ranks`
/// ranks, writes the manifest, synchronises files and folders, renames, sets
/// LATEST. The checkpoint's path. After a throw (CheckpointError) neither it
/// nor its files are there.
std::filesystem::path commit_checkpoint(
    const std::filesystem::path& folder, CheckpointManifest manifest,
    int64_t ranks);

/// Removes the folder of a checkpoint that could not be finished. Throws
/// nothing.
void abandon_checkpoint(const std::filesystem::path& folder, int64_t step);

/// Removes checkpoints that need not stay: those that it removed. The latest
/// always stays; so does, where `best` is asked for, one whose manifest cannot
/// be read. Throws CheckpointError: then some of them may be there still, each
/// whole.
std::vector<CheckpointPlace>
keep_checkpoints(const std::filesystem::path& folder, const KeepRule& rule);

/// Takes a damaged checkpoint out of the way, so that training can write its
/// step again: it stays under the path that is returned, for who wants to look
/// at it, but is no checkpoint any more. Throws CheckpointError.
std::filesystem::path set_aside(const CheckpointPlace& checkpoint);

}  // namespace echelon
