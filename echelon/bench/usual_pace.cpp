#include "echelon/bench/usual_pace.h"

#include <algorithm>

namespace echelon {
namespace {

constexpr double kMuchSlower = 1.25;

}  // namespace

bool UsualPace::slow(double seconds) {
  least_ = std::min(least_, seconds);
  if (seconds <= kMuchSlower * least_ || patience_ == 0) return false;
  --patience_;
  return true;
}

}  // namespace echelon
