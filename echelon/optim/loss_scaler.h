// Loss scaling for fp16: the loss is multiplied by a scale before backward
// so that small gradients do not vanish, and gradients are divided by it before
// the update; a step with a gradient that is not finite, on any rank, is
// skipped by all. Source: Micikevicius et al., 2018, arXiv:1710.03740,
// section 3.2.
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

  double scale() const { return scale_; }
  bool active() const { return dynamic_ || scale_ != 1.0; }

  /// Divides `gradients` by the scale, in place, and says whether all of them
  /// are finite, on all ranks that `sum` sums over (null: this one alone).
  /// Then, when the scale is dynamic, doubles it after
  /// options.loss_scale_growth steps without overflow, or halves it. False:
  /// skip the update, on every rank. Undefined gradients are left out. Waits
  /// for the device.
  ///
  /// Throws NumericError, on every rank, at options.max_overflows skipped steps
  /// in a row: their number, the scale, what to do.
  bool
  unscale(const std::vector<torch::Tensor>& gradients, const SumOverRanks& sum);

  /// Steps skipped in a row.
  int64_t overflows() const { return overflows_; }

  /// For checkpoints.
  struct State {
    double scale = 1;
    int64_t good_steps = 0;  // since the scale changed
    int64_t overflows = 0;
  };
  State state() const;
  /// Throws CheckpointError for numbers that no scaler has.
  void load_state(const State& state);

 private:
  [[noreturn]] void fail() const;

  PrecisionOptions options_;
  bool dynamic_;
  double scale_;
  int64_t good_steps_ = 0;
  int64_t overflows_ = 0;
};

}  // namespace echelon
