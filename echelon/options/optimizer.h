// Settings of the optimizer.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace echelon {

/// How the learning rate changes after the warmup (optim/optimizer.h).
enum class RateSchedule { constant, cosine, linear, step };

enum class OptimizerKind { sgd, adam, adamw };

/// Its name in a configuration.
std::string to_string(OptimizerKind kind);

struct OptimizerOptions {
  OptimizerKind name = OptimizerKind::adamw;
  double learning_rate = 1e-3;
  /// Not applied to biases and norm parameters. Unset: PyTorch's default of
  /// the optimizer, which decay() gives.
  std::optional<double> weight_decay;
  double momentum = 0.0;  // sgd
  bool nesterov = false;  // sgd
  double beta1 = 0.9;     // adam, adamw
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double clip_norm = 0.0;  // largest global gradient norm; 0: no clipping

  RateSchedule schedule = RateSchedule::constant;
  int64_t warmup_steps = 0;   // linear, from 0 to learning_rate
  double final_factor = 0.0;  // cosine, linear: last rate / first rate
  int64_t step_every = 0;     // step: steps between two drops
  double step_factor = 0.1;   // step: what a drop multiplies by

  /// weight_decay, or its default: 0.01 for adamw, 0 for adam and sgd.
  double decay() const {
    return weight_decay.value_or(name == OptimizerKind::adamw ? 0.01 : 0.0);
  }
};

}  // namespace echelon
