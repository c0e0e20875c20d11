// Settings of checkpoints.
#pragma once

#include <cstdint>
#include <string>

namespace echelon {

/// The metric whose best checkpoint is kept too; loss is that of training.
enum class BestMetric { none, loss, eval_loss, eval_accuracy };

/// Its name in a configuration, which is the metric's.
std::string to_string(BestMetric metric);

struct CheckpointOptions {
  int64_t every_steps = 0;   // between two checkpoints; 0: not by steps
  double every_minutes = 0;  // 0: not by time
  bool at_end = true;        // after the last step
  int64_t keep = 2;          // how many of the newest to keep; at least 2
  BestMetric best = BestMetric::none;
  bool async = true;     // write files while training continues
  int64_t attempts = 3;  // intervals that may fail in a row
  /// auto | never | a run's folder or a checkpoint. A run without checkpoints
  /// of its own starts from the folder or checkpoint named here. A run that has
  /// some resumes from the newest of them, unless this is never.
  std::string resume = "auto";
  bool force = false;  // resume although seed or data differ
  /// "s3://bucket/prefix": committed checkpoints are also uploaded there, and a
  /// run without them starts from the newest there. Empty: nowhere.
  std::string remote;

  bool operator==(const CheckpointOptions&) const = default;
};

/// Whether the run saves checkpoints, apart from those that SIGUSR1 asks for.
bool saves(const CheckpointOptions& options);
/// Whether it writes some while training continues, from a copy of the state in
/// the host's memory.
bool saves_in_background(const CheckpointOptions& options);

}  // namespace echelon
