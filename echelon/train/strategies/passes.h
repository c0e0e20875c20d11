// The passes of one optimizer step over a rank's part of a global batch, one
// piece of it after the other.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>

#include "echelon/timeline/recorder.h"
#include "echelon/train/strategies/objective.h"

namespace echelon {

struct Passes {
  const Objective& objective;
  int64_t count = 1;             // pieces
  Recorder* recorder = nullptr;  // gets spans "forward" and "backward"

  /// What surrounds a piece's forward and backward while it lives; may be null.
  std::function<std::shared_ptr<void>(bool last)> around = nullptr;
  std::function<Tensors(const Tensors& inputs)> forward;
  /// Before a piece's backward.
  std::function<void(bool last)> before_backward = nullptr;

  /// `batch`: prepared. Each piece's sum of losses, times `scale`, is
  /// differentiated; gradients add up.
  Score run(const Batch& batch, double scale) const;
};

/// `inputs` of one sample of zeros, for a rank that has none while others,
/// which gather parameters with it, do.
Tensors stand_in(const Tensors& inputs);

}  // namespace echelon
