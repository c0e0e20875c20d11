// Notices that a processor's cores are slower than they were.
#pragma once

#include <cstdint>
#include <limits>

namespace echelon {

/// Whether others slow the processor's cores down: two programs on what are two
/// threads of one core take up to 1.8 times as long, for seconds, which no
/// median of a second's rounds survives.
class UsualPace {
 public:
  /// How often `slow` may say so; then things are as they are.
  explicit UsualPace(int64_t patience) : patience_(patience) {}
  /// Told the seconds of the same work each time: were they much more than the
  /// least?
  bool slow(double seconds);

 private:
  int64_t patience_;
  double least_ = std::numeric_limits<double>::infinity();
};

}  // namespace echelon
