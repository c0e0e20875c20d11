// The learning rate over a run: warm-up, then constant, cosine, linear or step.
#pragma once

#include <cstdint>

#include "echelon/options/optimizer.h"

namespace echelon {

/// The factor of the optimizer's learning rate in each step. A value.
///
/// With w warm-up steps and T steps in all, the factor of step s (from 0) is
///   s <  w   (s + 1) / (w + 1)
///   s >= w   with p = (s - w) / (T - w), f = final_factor:
///     constant  1
///     linear    1 + (f - 1) p
///     cosine    f + (1 - f) (1 + cos(pi p)) / 2
///     step      step_factor ^ floor((s - w) / step_every)
/// A step beyond T has the factor of T.
/// Source of the cosine schedule: Loshchilov and Hutter, "SGDR", 2016,
/// arXiv:1608.03983.
class LearningRateSchedule {
 public:
  /// Reads schedule, warmup_steps, final_factor, step_every, step_factor.
  /// Throws ConfigError with the values for an unknown schedule, a warm-up that
  /// is not shorter than the run, a `step` without step_every, or a factor that
  /// is negative or not finite.
  LearningRateSchedule(const OptimizerOptions& options, int64_t total_steps);

  double factor(int64_t step) const;

 private:
  enum class Kind { constant, cosine, linear, step };

  OptimizerOptions options_;
  int64_t total_steps_;
  Kind kind_ = Kind::constant;
};

}  // namespace echelon
