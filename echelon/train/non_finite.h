// Steps whose loss or gradients are not finite numbers, and what becomes of
// them by [train] on_non_finite.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/options/train.h"
#include "echelon/timeline/rollback.h"

namespace echelon {

/// Counts the steps that are skipped in a row. Overflows of fp16, which the
/// loss scale handles, are none of them.
class NonFiniteSteps {
 public:
  static constexpr int64_t kMostInARow = 3;
  /// Roll-backs are in a row when fewer than kBetween finite steps are between
  /// them.
  static constexpr int64_t kMostRollbacks = 3;
  static constexpr int64_t kBetween = 100;

  explicit NonFiniteSteps(OnNonFinite choice) : choice_(choice) {}

  /// Whether one more may be skipped; otherwise training goes back or ends.
  bool may_skip() const {
    return choice_ != OnNonFinite::stop && in_a_row_ < kMostInARow;
  }
  /// Whether training may go back from `step`; `before`: the run's roll-backs.
  bool may_go_back(
      int64_t step, const std::vector<timeline::Rollback>& before) const;
  /// The first of the steps in a row, of which `step` is the last and not
  /// counted yet.
  int64_t first_of(int64_t step) const { return step - in_a_row_; }
  /// Counts `step` as skipped, and returns the warning. `why`: a clause.
  std::string skip(int64_t step, const std::string& why);
  /// A step has updated the parameters, or training went back.
  void on_update() { in_a_row_ = 0; }
  /// ", and 3 steps before it were skipped"; empty when none was.
  std::string skipped_before() const;

 private:
  const OnNonFinite choice_;
  int64_t in_a_row_ = 0;
};

}  // namespace echelon
