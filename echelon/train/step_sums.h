// What ranks tell each other once a step, after backward: one small all_reduce.
#pragma once

#include <cstdint>

#include "echelon/comm/world.h"
#include "echelon/train/saving/saver.h"
#include "echelon/train/strategies/objective.h"

namespace echelon {

/// This rank's part.
struct StepShare {
  Score score;              // of its samples; loss_sum may be NaN or infinite
  int64_t skipped = 0;      // samples that could not be read
  double work_seconds = 0;  // since the step began, until now
  bool stop = false;        // it was asked to end after the step
  bool terminated = false;  // and that by SIGTERM
  SaverNews saver;
};

/// What all ranks know then.
struct StepSums {
  double loss_sum = 0;  // of the ranks whose loss is finite
  double count = 0;     // units
  double samples = 0;
  double skipped = 0;
  bool stop = false;       // one rank was asked to
  bool preempted = false;  // one of them by SIGTERM
  SaverNews saver;
  int64_t bad_rank = -1;      // first rank whose loss is not finite
  int32_t slowest_rank = -1;  // none of one rank
  double slowest_excess = 0;  // its work over the mean, less 1
};

/// Every rank of the world calls, and gets the same.
StepSums share_sums(const StepShare& own, const World& world);

}  // namespace echelon
