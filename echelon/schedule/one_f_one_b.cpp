#include "echelon/schedule/one_f_one_b.h"

#include <algorithm>

#include "echelon/schedule/builder.h"

namespace echelon {

Schedule make_1f1b(int32_t ranks, int32_t microbatches) {
  Schedule schedule = detail::looped("1f1b", ranks, microbatches, 1);
  for (int32_t rank = 0; rank < ranks; ++rank) {
    detail::RankBuilder list(schedule, rank);
    const int32_t warmup = std::min(ranks - 1 - rank, microbatches);
    for (int32_t m = 0; m < warmup; ++m) list.forward(0);
    for (int32_t m = warmup; m < microbatches; ++m) {
      list.forward(0);
      list.backward(0);
    }
    for (int32_t m = 0; m < warmup; ++m) list.backward(0);
  }
  return schedule;
}

}  // namespace echelon
