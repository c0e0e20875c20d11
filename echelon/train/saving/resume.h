// Resumes training from a checkpoint of any layout.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/format/manifest.h"
#include "echelon/comm/mesh_groups.h"
#include "echelon/job/job.h"
#include "echelon/train/saving/restart_memory.h"
#include "echelon/train/strategies/model_source.h"
#include "echelon/train/strategies/step.h"

namespace echelon {

/// The checkpoints that a run may resume from.
struct Resume {
  std::vector<CheckpointPlace> candidates;  // in the order to try them
  size_t in_memory = 0;             // the first of them, this run's own too
  RestartMemory* memory = nullptr;  // where these are; null: there is none
  bool own = false;  // they are this run's own: its metrics are continued
  /// checkpoint.resume names others, which the run's own replace.
  bool instead_of_others = false;
};

/// The run's own checkpoints if `folder` has some, else those that
/// options.resume names; no candidates when training starts from step 0. Those
/// in memory come first, if they are newer than the run's own. Throws
/// CheckpointError when a named one is needed and missing.
///
///   memory  borrowed; null: there is none
Resume find_resume(
    const CheckpointOptions& options, const std::filesystem::path& folder,
    RestartMemory* memory = nullptr);

/// The run's own checkpoints from before `step`, to which training may go back,
/// those in memory first, if they are newer; no candidates when there are none.
/// No rank may be writing one.
Resume find_before(
    const std::filesystem::path& folder, RestartMemory* memory, int64_t step);

/// Describes the samples for a checkpoint: a line for each setting and count
/// that decides which samples a step sees.
std::string describe_samples(const Job& job, const TrainingData& data);

/// `samples` with the position of a stream, for CheckpointManifest::data, and
/// that position again; empty: none. Comparisons of samples leave it out.
std::string
with_position(const std::string& samples, const std::string& stream);
std::string stream_position(const CheckpointManifest& manifest);

/// The differences between a job and a checkpoint in layout, ranks and
/// settings, a line each: "layout: was tp=2, now dp=2".
std::vector<std::string> differences(
    const CheckpointManifest& manifest, const Job& job,
    const std::string& samples, int64_t total_steps);

/// The state of training after resume().
struct Resumed {
  CheckpointManifest manifest;
  std::filesystem::path path;  // of the checkpoint
  bool own = false;            // it is this run's own
  bool in_memory = false;
  /// What could not be restored as it was saved, a line each (load_state); the
  /// same on all ranks.
  std::vector<std::string> lines;
};

/// What a resumed run prints: the checkpoint, what could not be restored, and
/// the settings that differ from the saved ones, a line each.
std::string describe(
    const Resumed& resumed, const Resume& from, const Job& job,
    const std::string& samples, int64_t total_steps);

/// Fills `state` from the first candidate that is intact and finite, and warns
/// of those that are not. Every rank of the world calls this. Throws
/// CheckpointError when none is intact, or when it is of another model or
/// (unless job.checkpoint.force) of another seed or other data. Throws Error
/// when all candidates were in memory, after removing them: a restart does
/// without.
Resumed resume(
    const Resume& from, const Job& job, TrainingState& state,
    const ModelSource& source, World& world, const MeshGroups& groups,
    const std::string& samples);

}  // namespace echelon
