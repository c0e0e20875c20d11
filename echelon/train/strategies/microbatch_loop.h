// The forward and backward passes of one optimizer step: a rank's part of the
// global batch, one microbatch after the other.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>

#include "echelon/timeline/recorder.h"
#include "echelon/train/strategies/objective.h"

namespace echelon {

struct MicrobatchLoop {
  const TrainingObjective& objective;
  int64_t num_microbatches = 1;
  Recorder* recorder = nullptr;  // gets spans "forward" and "backward"

  /// Returns a guard that lives during a microbatch's forward and backward; may
  /// be null.
  std::function<std::shared_ptr<void>(bool last)> around = nullptr;
  std::function<Tensors(const Tensors& inputs)> forward;
  /// Called before a microbatch's backward.
  std::function<void(bool last)> before_backward = nullptr;

  /// Runs a prepared batch. Differentiates each microbatch's sum of losses
  /// times `scale`; gradients accumulate.
  Score run(const Batch& batch, double scale) const;
};

/// `inputs` of one sample of zeros: for a rank without samples that must gather
/// parameters with ranks that have some.
Tensors stand_in(const Tensors& inputs);

}  // namespace echelon
