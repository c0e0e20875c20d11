#include "echelon/schedule/gpipe.h"

#include "echelon/schedule/builder.h"

namespace echelon {

Schedule make_gpipe(int32_t ranks, int32_t microbatches) {
  Schedule schedule = detail::looped("gpipe", ranks, microbatches, 1);
  for (int32_t rank = 0; rank < ranks; ++rank) {
    detail::RankBuilder list(schedule, rank);
    for (int32_t m = 0; m < microbatches; ++m) list.forward(0);
    for (int32_t m = 0; m < microbatches; ++m) list.backward(0);
  }
  return schedule;
}

}  // namespace echelon
