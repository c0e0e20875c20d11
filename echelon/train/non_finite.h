// Steps whose loss or gradients are not finite numbers, and what becomes of
// them by [train] on_non_finite.
#pragma once

#include <cstdint>
#include <string>

#include "echelon/options/train.h"

namespace echelon {

/// Counts the steps that are skipped in a row. Overflows of fp16, which the
/// loss scale handles, are none of them.
class NonFiniteSteps {
 public:
  static constexpr int64_t kMostInARow = 3;

  explicit NonFiniteSteps(OnNonFinite choice) : choice_(choice) {}

  /// Whether one more may be skipped; otherwise it ends the run.
  bool may_skip() const {
    return choice_ == OnNonFinite::skip && in_a_row_ < kMostInARow;
  }
  /// Counts `step` as skipped, and returns the warning. `why`: a clause.
  std::string skip(int64_t step, const std::string& why);
  /// A step has updated the parameters.
  void on_update() { in_a_row_ = 0; }
  /// ", and 3 steps before it were skipped"; empty when none was.
  std::string skipped_before() const;

 private:
  const OnNonFinite choice_;
  int64_t in_a_row_ = 0;
};

}  // namespace echelon
