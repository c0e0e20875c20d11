// Settings of checkpoints. Free of LibTorch: the command line checks them.
#pragma once

#include <cstdint>
#include <string>

namespace echelon {

namespace config {
class Section;
}

struct CheckpointOptions {
  int64_t every_steps = 0;   // between two checkpoints; 0: not by steps
  double every_minutes = 0;  // 0: not by time
  bool at_end = true;        // after the last step
  int64_t keep = 2;          // the newest ones; at least 2
  /// And the best one: none | loss (of training) | eval_loss | eval_accuracy.
  std::string best = "none";
  bool async = true;     // files are written beside training
  int64_t attempts = 3;  // intervals that may fail in a row
  /// auto | never | a run's folder or a checkpoint: what a run begins with that
  /// has no checkpoints yet. With some of its own it goes on from the newest of
  /// them, unless this is never.
  std::string resume = "auto";
  bool force = false;  // resume though seed or data differ

  bool operator==(const CheckpointOptions&) const = default;
};

/// Whether there are any, and whether some are written beside training, from a
/// copy of the state in the host's memory (those that SIGUSR1 asks for aside).
bool saves(const CheckpointOptions& options);
bool saves_beside(const CheckpointOptions& options);

void bind(
    config::Section& section, CheckpointOptions& options);  // [checkpoint]

}  // namespace echelon
