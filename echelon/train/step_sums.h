// What ranks tell each other once a step, after backward, by one small
// all-reduce.
#pragma once

#include <cstdint>
#include <vector>

#include <torch/types.h>

#include "echelon/comm/world.h"
#include "echelon/train/saving/saver.h"
#include "echelon/train/strategies/objective.h"

namespace echelon {

/// What this rank contributes.
struct StepShare {
  Score score;              // of its samples; the loss may be NaN or infinite
  int64_t skipped = 0;      // samples that could not be read
  double work_seconds = 0;  // since the step began, without waits for peers
  bool stop = false;        // the process was asked to stop after the step
  bool terminated = false;  // it was asked by SIGTERM
  SaverNews saver;
  bool memory = false;       // a copy in memory is wanted
  bool memory_busy = false;  // the previous copy is still being sent
  bool record = false;       // a step is wanted for those who watch
  /// ParallelModel::expert_counts(); on every rank of one size, or undefined.
  torch::Tensor expert_counts = {};
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
  bool memory = false;               // a copy in memory is to be made
  bool record = false;               // the step to come is to be recorded
  int64_t bad_rank = -1;             // first rank whose loss is not finite
  int32_t slowest_rank = -1;         // -1 with one rank
  double slowest_excess = 0;         // its work seconds over the mean, less 1
  std::vector<double> work_seconds;  // by rank
  std::vector<int64_t> expert_counts;
};

/// Sums what ranks contribute. Every rank of the world calls this and gets the
/// same: float64 numbers on the world's device, for read_sums(). Waits for
/// nothing.
torch::Tensor sum_over_ranks(const StepShare& own, const World& world);
/// 1 when the loss of a rank is not finite, or there is no unit, so that the
/// update must be skipped; else 0. A float32 scalar on the device of `sums`;
/// undefined stands for 0 too.
torch::Tensor must_skip(const torch::Tensor& sums, int64_t num_ranks);
/// `sums`: sum_over_ranks()'s, on the CPU.
StepSums read_sums(const torch::Tensor& sums, int64_t num_ranks);

}  // namespace echelon
