#include "echelon/train/step_sums.h"

#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "echelon/comm/group.h"

namespace echelon {
namespace {

// This struct is sent as it is and summed over ranks, so it has numbers alone.
struct Summands {
  double loss_sum = 0;
  double count = 0;
  double samples = 0;
  double skipped = 0;
  double stop = 0;
  double terminated = 0;
  SaverNews saver;
};
constexpr int64_t kSummands = sizeof(Summands) / sizeof(double);
static_assert(std::is_trivially_copyable_v<Summands>);
static_assert(sizeof(Summands) == 9 * sizeof(double), "nothing but numbers");

Summands summands_of(const StepShare& own) {
  return {
      .loss_sum = std::isfinite(own.score.loss_sum) ? own.score.loss_sum : 0,
      .count = static_cast<double>(own.score.count),
      .samples = static_cast<double>(own.score.samples),
      .skipped = static_cast<double>(own.skipped),
      .stop = own.stop ? 1.0 : 0.0,
      .terminated = own.terminated ? 1.0 : 0.0,
      .saver = own.saver};
}

// `work` and `bad` have a number for each rank.
void compare_ranks(
    const double* work, const double* bad, int64_t num_ranks, StepSums& sums) {
  double total = 0;
  double most = 0;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    total += work[rank];
    if (work[rank] > most) {
      most = work[rank];
      sums.slowest_rank = static_cast<int32_t>(rank);
    }
    if (bad[rank] > 0 && sums.bad_rank < 0) sums.bad_rank = rank;
  }
  if (num_ranks == 1) sums.slowest_rank = -1;
  if (total > 0) {
    sums.slowest_excess = most * static_cast<double>(num_ranks) / total - 1;
  }
}

}  // namespace

StepSums share_sums(const StepShare& own, const World& world) {
  const int64_t size = world.size();
  // [Summands, work of each rank, whether each rank's loss is not finite]
  auto numbers = torch::zeros({kSummands + 2 * size}, torch::kFloat64);
  double* values = numbers.data_ptr<double>();
  const Summands mine = summands_of(own);
  std::memcpy(values, &mine, sizeof mine);
  double* work = values + kSummands;
  double* bad = work + size;
  work[world.rank()] = own.work_seconds;
  bad[world.rank()] = std::isfinite(own.score.loss_sum) ? 0 : 1;
  numbers = numbers.to(world.device());
  world.group().all_reduce(numbers, ReduceOp::sum, {.label = "step sums"});
  numbers = numbers.to(torch::kCPU);

  values = numbers.data_ptr<double>();
  Summands all;
  std::memcpy(static_cast<void*>(&all), values, sizeof all);
  StepSums sums{
      .loss_sum = all.loss_sum,
      .count = all.count,
      .samples = all.samples,
      .skipped = all.skipped,
      .stop = all.stop > 0,
      .preempted = all.terminated > 0,
      .saver = all.saver};
  work = values + kSummands;
  compare_ranks(work, work + size, size, sums);
  return sums;
}

}  // namespace echelon
