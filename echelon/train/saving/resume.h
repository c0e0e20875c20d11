// Taking training up again from a checkpoint, of any layout.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/format/manifest.h"
#include "echelon/comm/mesh_groups.h"
#include "echelon/job/job.h"
#include "echelon/train/strategies/model_source.h"
#include "echelon/train/strategies/step.h"

namespace echelon {

/// Where a run goes on from.
struct Resume {
  std::vector<CheckpointPlace> candidates;  // in the order to try them
  bool own = false;  // of this run's folder: metrics go on
  /// They count more than others, which checkpoint.resume names.
  bool instead_of_others = false;
};

/// The run's own, where `folder` has some; else by job.checkpoint.resume.
/// Nothing to try when training begins anew. Throws CheckpointError when what
/// is named is needed and not there.
Resume find_resume(const Job& job, const std::filesystem::path& folder);

/// What the samples are, for a checkpoint: a line for each setting and count
/// that decides which ones a step sees.
std::string describe_samples(const Job& job, int64_t train, int64_t holdout);

/// What differs between a checkpoint and a job, in words, a line each, now and
/// then: layout, ranks, settings.
std::vector<std::string> differences(
    const CheckpointManifest& manifest, const Job& job,
    const std::string& samples, int64_t total_steps);

/// Where training is after resume().
struct Resumed {
  CheckpointManifest manifest;
  std::filesystem::path path;  // of the checkpoint
  /// What could not be taken over as it was saved, a line each (load_state);
  /// the same on all ranks.
  std::vector<std::string> lines;
};

/// Fills `state` from the first candidate that is whole, warning of those that
/// are not. Every rank of the world calls. Throws CheckpointError when none is,
/// or when it is of another model, or (unless job.checkpoint.force) of another
/// seed or other data.
Resumed resume(
    const Resume& from, const Job& job, TrainingState& state,
    const ModelSource& source, World& world, const MeshGroups& groups,
    const std::string& samples);

}  // namespace echelon
