#include "echelon/schedule/interleaved.h"

#include <algorithm>

#include "echelon/schedule/builder.h"
#include "echelon/schedule/one_f_one_b.h"

namespace echelon {
namespace {

// The rank's stage of each step: rounds of microbatches, each through all of
// its stages. Backwards see the stages from the other end.
std::vector<int32_t>
stage_by_step(int32_t ranks, int32_t microbatches, int32_t per_rank) {
  const int32_t rounds = std::max(1, microbatches / ranks);
  std::vector<int32_t> stages;
  stages.reserve(static_cast<size_t>(microbatches) * per_rank);
  for (int32_t round = 0; round < rounds; ++round) {
    const int32_t length =
        microbatches / rounds + (round < microbatches % rounds ? 1 : 0);
    for (int32_t local = 0; local < per_rank; ++local) {
      stages.insert(stages.end(), static_cast<size_t>(length), local);
    }
  }
  return stages;
}

}  // namespace

Schedule
make_interleaved(int32_t ranks, int32_t microbatches, int32_t stages_per_rank) {
  if (stages_per_rank == 1) {
    Schedule schedule = make_1f1b(ranks, microbatches);
    schedule.name = "interleaved";
    return schedule;
  }
  const int32_t v = stages_per_rank;
  Schedule schedule = detail::looped("interleaved", ranks, microbatches, v);
  const auto stages = stage_by_step(ranks, microbatches, v);
  const int32_t steps = v * microbatches;
  const int32_t rounds = std::max(1, microbatches / ranks);
  const int32_t longest = (microbatches + rounds - 1) / rounds;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    detail::RankBuilder list(schedule, rank);
    const auto local = [&](int32_t step) {
      return stages[static_cast<size_t>(step)];
    };
    const int32_t warmup =
        std::min(steps, (v - 1) * longest + 2 * (ranks - 1 - rank));
    for (int32_t step = 0; step < steps + warmup; ++step) {
      if (step < steps) list.forward(local(step));
      if (step >= warmup) list.backward(v - 1 - local(step - warmup));
    }
  }
  return schedule;
}

}  // namespace echelon
