#include "echelon/optim/learning_rate.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <string>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

void check_factor(const char* key, double value) {
  if (!std::isfinite(value) || value < 0.0) {
    throw ConfigError(format(
        "[optimizer] {}={:f}: a learning rate is multiplied by it, so it must "
        "be 0 or more",
        key, value));
  }
}

}  // namespace

LearningRateSchedule::LearningRateSchedule(
    const OptimizerOptions& options, int64_t total_steps)
    : options_(options), total_steps_(std::max<int64_t>(total_steps, 1)) {
  static const std::map<std::string, Kind> kinds = {
      {"constant", Kind::constant},
      {"cosine", Kind::cosine},
      {"linear", Kind::linear},
      {"step", Kind::step}};
  const auto kind = kinds.find(options.schedule);
  if (kind == kinds.end()) {
    throw ConfigError(format(
        "[optimizer] schedule=\"{}\" is not a schedule; choose constant, "
        "cosine, linear or step",
        options.schedule));
  }
  kind_ = kind->second;
  const int64_t warmup = options.warmup_steps;
  if (warmup < 0 || (warmup > 0 && warmup >= total_steps_)) {
    throw ConfigError(format(
        "[optimizer] warmup_steps={} must be 0 or more and less than the run's "
        "{} steps",
        warmup, total_steps_));
  }
  check_factor("final_factor", options.final_factor);
  check_factor("step_factor", options.step_factor);
  if (kind_ == Kind::step && options.step_every < 1) {
    throw ConfigError(format(
        "[optimizer] schedule=\"step\" needs step_every, the steps between two "
        "drops, 1 or more; it is {}",
        options.step_every));
  }
}

double LearningRateSchedule::factor(int64_t step) const {
  step = std::clamp<int64_t>(step, 0, total_steps_);
  const int64_t warmup = options_.warmup_steps;
  if (step < warmup) {
    return static_cast<double>(step + 1) / static_cast<double>(warmup + 1);
  }
  const int64_t after = step - warmup;
  const double last = options_.final_factor;
  const double progress =
      static_cast<double>(after) / static_cast<double>(total_steps_ - warmup);
  switch (kind_) {
    case Kind::constant:
      return 1.0;
    case Kind::linear:
      return 1.0 + (last - 1.0) * progress;
    case Kind::cosine:
      return last +
             (1.0 - last) * 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
    case Kind::step:
      return std::pow(
          options_.step_factor,
          static_cast<double>(after / options_.step_every));
  }
  return 1.0;
}

}  // namespace echelon
