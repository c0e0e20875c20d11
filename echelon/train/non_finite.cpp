#include "echelon/train/non_finite.h"

#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon {

bool NonFiniteSteps::may_go_back(
    int64_t step, const std::vector<timeline::Rollback>& before) const {
  if (choice_ != OnNonFinite::rollback) return false;
  int64_t in_a_row = 0;
  int64_t bad = first_of(step);
  for (auto at = before.rbegin(); at != before.rend(); ++at) {
    if (bad - 1 - at->step >= kBetween) break;
    ++in_a_row;
    bad = at->from_step;
  }
  return in_a_row < kMostRollbacks;
}

std::string NonFiniteSteps::skip(int64_t step, const std::string& why) {
  ++in_a_row_;
  return format(
      "warning: step {} is skipped, {} of at most {} in a row: {}; parameters "
      "are those of step {}",
      step, in_a_row_, kMostInARow, why, step - 1);
}

std::string NonFiniteSteps::skipped_before() const {
  if (in_a_row_ == 0) return "";
  return format(
      ", and {} before it {} skipped", counted(in_a_row_, "step"),
      in_a_row_ == 1 ? "was" : "were");
}

}  // namespace echelon
