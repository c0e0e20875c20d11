// Dynamic loss scaling for fp16: the loss is multiplied by a scale before backward
// so that small gradients do not vanish, and gradients are divided by it before the
// update; a step with a gradient that is not finite, on any rank, is skipped by all.
// Source: Micikevicius et al., 2018, arXiv:1710.03740, section 3.2.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <vector>

#include "echelon/optim/clip.h"
#include "echelon/optim/precision_options.h"

namespace echelon {

/// One per rank; equal calls give equal scales on all ranks.
class LossScaler {
 public:
  /// `dynamic`: options.loss_scale is 0 and the compute dtype is fp16.
  LossScaler(const PrecisionOptions& options, bool dynamic);

  double scale() const { return scale_; }
  bool active() const { return dynamic_ || scale_ != 1.0; }

  /// Divides `gradients` by the scale, in place, and says whether all of them are
  /// finite, on all ranks that `sum` sums over (null: this one alone). Then grows or
  /// halves the scale. False: skip the update. Waits for the device.
  bool unscale(
      const std::vector<torch::Tensor>& gradients, const SumOverRanks& sum);

  /// Steps skipped in a row. Throws NumericError at options.max_overflows: scale,
  /// step count, what to do.
  int64_t overflows() const { return overflows_; }

  /// For checkpoints.
  struct State {
    double scale = 1;
    int64_t good_steps = 0;
    int64_t overflows = 0;
  };
  State state() const;
  void load_state(const State& state);

 private:
  PrecisionOptions options_;
  bool dynamic_;
  double scale_;
  int64_t good_steps_ = 0;
  int64_t overflows_ = 0;
};

}  // namespace echelon
