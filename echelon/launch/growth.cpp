#include "echelon/launch/growth.h"

#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::launch {
namespace {

// In which a change must pay.
constexpr double kHorizonSeconds = 600;

}  // namespace

std::string why_not_grow(const Growth& growth) {
  if (growth.step_now <= 0 || growth.step_then <= 0) return "";
  const std::string steps = format(
      "a step is predicted to take {} with it and {} without",
      format_seconds(growth.step_then), format_seconds(growth.step_now));
  if (growth.step_then >= growth.step_now) return steps;
  // The work of the horizon takes so much less.
  const double gain =
      kHorizonSeconds * (1 - growth.step_then / growth.step_now);
  if (gain > growth.change) return "";
  return format(
      "{}, which saves {} in 10 minutes, and the change costs {}", steps,
      format_seconds(gain), format_seconds(growth.change));
}

}  // namespace echelon::launch
