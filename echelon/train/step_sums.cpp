#include "echelon/train/step_sums.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "echelon/comm/group.h"
#include "echelon/layers/host_copy.h"

namespace echelon {
namespace {

// This struct is sent as it is and summed over ranks, so it has numbers alone.
// Behind it are two numbers for each rank: its work's seconds, then its loss.
// Each rank has a place of its own for the loss, so that a NaN names its rank.
// The counts of experts are last; they are below 2^53.
struct Summands {
  double count = 0;
  double correct = 0;
  double samples = 0;
  double skipped = 0;
  double stop = 0;
  double terminated = 0;
  SaverNews saver;
  double memory = 0;
  double memory_busy = 0;
  double record = 0;
};
constexpr int64_t kSummands = sizeof(Summands) / sizeof(double);
static_assert(std::is_trivially_copyable_v<Summands>);
static_assert(sizeof(Summands) == 12 * sizeof(double), "nothing but numbers");

void compare_ranks(const double* work, int64_t num_ranks, StepSums& sums) {
  sums.work_seconds.assign(work, work + num_ranks);
  double total = 0;
  double most = 0;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    total += work[rank];
    if (work[rank] > most) {
      most = work[rank];
      sums.slowest_rank = static_cast<int32_t>(rank);
    }
  }
  if (num_ranks == 1) sums.slowest_rank = -1;
  if (total > 0) {
    sums.slowest_excess = most * static_cast<double>(num_ranks) / total - 1;
  }
}

}  // namespace

torch::Tensor sum_over_ranks(const StepShare& own, const World& world) {
  const torch::NoGradGuard no_grad;
  const int64_t size = world.size();
  const int64_t loss_place = kSummands + size + world.rank();
  auto host = torch::zeros({kSummands + 2 * size}, torch::kFloat64);
  Summands mine{
      .skipped = static_cast<double>(own.skipped),
      .stop = own.stop ? 1.0 : 0.0,
      .terminated = own.terminated ? 1.0 : 0.0,
      .saver = own.saver,
      .memory = own.memory ? 1.0 : 0.0,
      .memory_busy = own.memory_busy ? 1.0 : 0.0,
      .record = own.record ? 1.0 : 0.0};
  auto* values = host.data_ptr<double>();
  values[kSummands + world.rank()] = own.work_seconds;
  torch::Tensor sums = host;
  if (world.device().is_cpu()) {  // everything is at hand
    const auto score = own.score.totals();
    mine.count = static_cast<double>(score.count);
    mine.samples = static_cast<double>(score.samples);
    values[loss_place] = score.loss_sum;
    std::memcpy(values, &mine, sizeof mine);
  } else {
    std::memcpy(values, &mine, sizeof mine);
    sums = to_device(host, world.device());
    const auto score = own.score.sums(world.device());
    sums.narrow(0, 0, 3).copy_(score.narrow(0, 1, 3));
    sums[loss_place].copy_(score[0]);
  }
  if (own.expert_counts.defined()) {
    sums = at::cat({sums, own.expert_counts.view(-1).to(torch::kFloat64)});
  }
  world.group().all_reduce(sums, ReduceOp::sum, {.label = "step sums"});
  return sums;
}

torch::Tensor must_skip(const torch::Tensor& sums, int64_t num_ranks) {
  if (sums.is_cpu()) {
    const auto all = read_sums(sums, num_ranks);
    const bool skip = all.bad_rank >= 0 || !(all.count > 0);
    return skip ? torch::ones({}) : torch::Tensor();
  }
  const auto losses = sums.narrow(0, kSummands + num_ranks, num_ranks);
  const auto fine = at::isfinite(losses).all().logical_and_(sums[0].gt(0));
  return fine.logical_not_().to(torch::kFloat32);
}

StepSums read_sums(const torch::Tensor& numbers, int64_t num_ranks) {
  const auto* values = numbers.const_data_ptr<double>();
  Summands all;
  std::memcpy(static_cast<void*>(&all), values, sizeof all);
  StepSums sums{
      .count = all.count,
      .samples = all.samples,
      .skipped = all.skipped,
      .stop = all.stop > 0,
      .preempted = all.terminated > 0,
      .saver = all.saver,
      .memory = all.memory > 0 && all.memory_busy == 0,
      .record = all.record > 0};
  const double* work = values + kSummands;
  const double* losses = work + num_ranks;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    if (std::isfinite(losses[rank])) {
      sums.loss_sum += losses[rank];
    } else if (sums.bad_rank < 0) {
      sums.bad_rank = rank;
    }
  }
  compare_ranks(work, num_ranks, sums);
  for (const double* count = losses + num_ranks;
       count < values + numbers.numel(); ++count) {
    sums.expert_counts.push_back(static_cast<int64_t>(*count));
  }
  return sums;
}

}  // namespace echelon
