#include "echelon/schedule/breadth_first.h"

#include "echelon/schedule/builder.h"

namespace echelon {

Schedule make_breadth_first(
    int32_t ranks, int32_t microbatches, int32_t stages_per_rank) {
  Schedule schedule =
      detail::looped("breadth_first", ranks, microbatches, stages_per_rank);
  for (int32_t rank = 0; rank < ranks; ++rank) {
    detail::RankBuilder list(schedule, rank);
    for (int32_t local = 0; local < stages_per_rank; ++local) {
      for (int32_t m = 0; m < microbatches; ++m) list.forward(local);
    }
    for (int32_t local = stages_per_rank - 1; local >= 0; --local) {
      for (int32_t m = 0; m < microbatches; ++m) list.backward(local);
    }
  }
  return schedule;
}

}  // namespace echelon
