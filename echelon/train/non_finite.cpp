#include "echelon/train/non_finite.h"

#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon {

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
