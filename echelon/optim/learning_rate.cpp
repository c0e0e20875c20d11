#include "echelon/optim/learning_rate.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "echelon/error.h"

namespace echelon {
namespace {

void check_factor(const char* key, double value) {
  if (!std::isfinite(value) || value < 0.0) {
    throw ConfigError(
        std::string("[optimizer] ") + key + "=" + std::to_string(value) +
        ": a learning rate is multiplied by it, so it must be 0 or more");
  }
}

}  // namespace

LearningRateSchedule::LearningRateSchedule(
    const OptimizerOptions& options, int64_t total_steps)
    : warmup_steps_(options.warmup_steps),
      total_steps_(std::max<int64_t>(total_steps, 1)),
      final_factor_(options.final_factor),
      step_every_(options.step_every),
      step_factor_(options.step_factor) {
  if (options.schedule == "constant") {
    kind_ = Kind::constant;
  } else if (options.schedule == "cosine") {
    kind_ = Kind::cosine;
  } else if (options.schedule == "linear") {
    kind_ = Kind::linear;
  } else if (options.schedule == "step") {
    kind_ = Kind::step;
  } else {
    throw ConfigError(
        "[optimizer] schedule=\"" + options.schedule +
        "\" is not a schedule; choose constant, cosine, linear or step");
  }
  if (warmup_steps_ < 0 ||
      (warmup_steps_ > 0 && warmup_steps_ >= total_steps_)) {
    throw ConfigError(
        "[optimizer] warmup_steps=" + std::to_string(warmup_steps_) +
        " must be 0 or more and less than the run's " +
        std::to_string(total_steps_) + " steps");
  }
  check_factor("final_factor", final_factor_);
  check_factor("step_factor", step_factor_);
  if (kind_ == Kind::step && step_every_ < 1) {
    throw ConfigError(
        "[optimizer] schedule=\"step\" needs step_every, the steps between two "
        "drops, 1 or more; it is " +
        std::to_string(step_every_));
  }
}

double LearningRateSchedule::factor(int64_t step) const {
  step = std::clamp<int64_t>(step, 0, total_steps_);
  if (step < warmup_steps_) {
    return static_cast<double>(step + 1) /
           static_cast<double>(warmup_steps_ + 1);
  }
  const int64_t after = step - warmup_steps_;
  const double progress = static_cast<double>(after) /
                          static_cast<double>(total_steps_ - warmup_steps_);
  switch (kind_) {
    case Kind::constant:
      return 1.0;
    case Kind::linear:
      return 1.0 + (final_factor_ - 1.0) * progress;
    case Kind::cosine:
      return final_factor_ + (1.0 - final_factor_) * 0.5 *
                                 (1.0 + std::cos(std::numbers::pi * progress));
    case Kind::step:
      return std::pow(step_factor_, static_cast<double>(after / step_every_));
  }
  return 1.0;
}

}  // namespace echelon
