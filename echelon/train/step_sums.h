// What ranks tell each other once a step, after backward, by one small
// all-reduce.
#pragma once

#include <cstdint>

#include "echelon/comm/world.h"
#include "echelon/train/saving/saver.h"
#include "echelon/train/strategies/objective.h"

namespace echelon {

/// What this rank contributes.
struct StepShare {
  Score score;              // of its samples; loss_sum may be NaN or infinite
  int64_t skipped = 0;      // samples that could not be read
  double work_seconds = 0;  // since the step began
  bool stop = false;        // the process was asked to stop after the step
  bool terminated = false;  // it was asked by SIGTERM
  SaverNews saver;
};

/// What all ranks know afterwards.
struct StepSums {
  double loss_sum = 0;  // of the ranks whose loss is finite
  double count = 0;     // units
  double samples = 0;
  double skipped = 0;
  bool stop = false;       // some rank was asked to stop
  bool preempted = false;  // some rank was asked by SIGTERM
  SaverNews saver;
  int64_t bad_rank = -1;      // first rank whose loss is not finite
  int32_t slowest_rank = -1;  // -1 with one rank
  double slowest_excess = 0;  // its work seconds over the mean, less 1
};

/// Every rank of the world calls this and gets the same result.
StepSums share_sums(const StepShare& own, const World& world);

}  // namespace echelon
