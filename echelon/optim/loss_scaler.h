// Loss scaling for fp16. The loss is multiplied by a scale before backward, so
// that small gradients do not vanish, and gradients are divided by it before
// the update. All ranks skip a step in which any rank has a gradient that is
// not finite.
// Source: Micikevicius et al., 2018, arXiv:1710.03740, section 3.2.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <vector>

#include "echelon/optim/clip.h"
#include "echelon/options/precision.h"

namespace echelon {

/// One per rank; equal calls give equal scales on all ranks.
class LossScaler {
 public:
  /// `dynamic`: options.loss_scale is 0 and the compute dtype is fp16. Throws
  /// ConfigError for a scale that is not above 0, or above 2^126.
  LossScaler(const PrecisionOptions& options, bool dynamic);

  double scale() const { return state_.scale; }
  bool active() const { return dynamic_ || state_.scale != 1.0; }

  /// Divides `gradients` by the scale, in place, and returns whether all of
  /// them are finite, on all ranks that `sum` sums over (null: this one alone).
  /// When it returns false, every rank must skip the update. A dynamic scale is
  /// then halved; after options.loss_scale_growth steps without overflow it is
  /// doubled. Undefined gradients are left out. Waits for the device.
  ///
  /// Throws NumericError, on every rank, at options.max_overflows skipped steps
  /// in a row. The message has their number, the scale and what to do.
  bool
  unscale(const std::vector<torch::Tensor>& gradients, const SumOverRanks& sum);

  /// Steps skipped in a row.
  int64_t overflows() const { return state_.overflows; }

  /// For checkpoints.
  struct State {
    double scale = 1;
    int64_t good_steps = 0;  // since the scale changed
    int64_t overflows = 0;
  };
  const State& state() const { return state_; }
  /// Throws CheckpointError for numbers that no scaler has.
  void load_state(const State& state);

 private:
  [[noreturn]] void fail() const;

  PrecisionOptions options_;
  bool dynamic_;
  State state_;
};

}  // namespace echelon
