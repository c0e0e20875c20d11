#include "echelon/schedule/zero_bubble.h"

#include <algorithm>

#include "echelon/schedule/builder.h"

namespace echelon {
namespace {

// `slack` microbatches more in flight for each hop, before I or before W.
Schedule make_late_weights(
    const char* name, int32_t ranks, int32_t microbatches, int32_t slack) {
  Schedule schedule = detail::looped(name, ranks, microbatches, 1);
  for (int32_t rank = 0; rank < ranks; ++rank) {
    detail::RankBuilder list(schedule, rank);
    const int32_t warmup = slack * (ranks - 1 - rank);
    const int32_t delay = slack * rank;
    // Step k: forward of k, I of k - warmup, W of k - warmup - delay.
    const int32_t last = microbatches + warmup + delay;
    for (int32_t step = 0; step < last; ++step) {
      const int32_t input = step - warmup;
      if (step < microbatches) list.forward(0);
      if (input >= 0 && input < microbatches) list.backward_input(0);
      if (input >= delay) list.backward_weight(0);
    }
  }
  return schedule;
}

}  // namespace

Schedule make_zb_h1(int32_t ranks, int32_t microbatches) {
  return make_late_weights("zb-h1", ranks, microbatches, 1);
}

Schedule make_zb_h2(int32_t ranks, int32_t microbatches) {
  return make_late_weights("zb-h2", ranks, microbatches, 2);
}

}  // namespace echelon
