#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include "echelon/cost/framework.h"
#include "echelon/cost/step_estimate.h"
#include "echelon/cost/strategy.h"
#include "echelon/schedule/options.h"

namespace echelon::cost {
namespace {

/// Searches ask for the same schedules over and over, with other costs.
const Schedule& remembered(const ScheduleOptions& options) {
  using Key = std::tuple<ScheduleKind, int32_t, int32_t, int32_t>;
  constexpr int64_t kMostCells = int64_t{1} << 20;
  thread_local std::map<Key, Schedule> schedules;
  thread_local int64_t cells = 0;
  const Key key{
      options.kind, options.ranks, options.microbatches,
      options.stages_per_rank};
  const auto at = schedules.find(key);
  if (at != schedules.end()) return at->second;
  if (cells > kMostCells) {
    schedules.clear();
    cells = 0;
  }
  cells +=
      int64_t{options.ranks} * options.microbatches * options.stages_per_rank;
  return schedules.emplace(key, make_schedule(options)).first->second;
}

double timed(
    const Strategy& strategy, const std::vector<StageCost>& stages,
    int64_t microbatches) {
  ScheduleOptions options;
  options.kind = strategy.schedule;
  options.ranks = static_cast<int32_t>(strategy.layout.pp);
  options.microbatches = static_cast<int32_t>(microbatches);
  options.stages_per_rank = static_cast<int32_t>(stages_per_rank(strategy));
  const Timing timing = time_schedule(remembered(options), stages);
  if (!find_framework(strategy.framework).validates_afterwards)
    return timing.makespan;
  double longest = 0;
  for (const RankTiming& rank : timing.ranks) {
    longest = std::max(longest, rank.end - rank.begin);
  }
  return longest;
}

// A microbatch's forward and backward through all stages of the busiest rank.
double
busiest_rank(const Strategy& strategy, const std::vector<StageCost>& stages) {
  const auto rank_of_stage = rank_of_stages(strategy);
  std::vector<double> busy(static_cast<size_t>(strategy.layout.pp), 0);
  for (size_t stage = 0; stage < stages.size(); ++stage) {
    busy[static_cast<size_t>(rank_of_stage[stage])] +=
        stages[stage].forward + stages[stage].backward;
  }
  return *std::max_element(busy.begin(), busy.end());
}

}  // namespace

std::vector<int32_t> rank_of_stages(const Strategy& strategy) {
  const int64_t ranks = strategy.layout.pp;
  const int64_t stages = ranks * stages_per_rank(strategy);
  const bool turns = is_v_shaped(strategy.schedule);
  std::vector<int32_t> of_stage;
  for (int64_t stage = 0; stage < stages; ++stage) {
    const int64_t around = stage % ranks;
    of_stage.push_back(static_cast<int32_t>(
        turns && (stage / ranks) % 2 == 1 ? ranks - 1 - around : around));
  }
  return of_stage;
}

// A schedule repeats itself once its pipeline is full. Only the first rounds
// are timed and the others are added as periods, so that the time to estimate
// does not grow with the batch.
double pipeline_seconds(
    const Strategy& strategy, const std::vector<StageCost>& stages) {
  const int64_t microbatches = strategy.num_microbatches();
  if (strategy.layout.pp == 1) {
    double sum = 0;
    for (const StageCost& stage : stages) sum += stage.forward + stage.backward;
    return as_double(microbatches) * sum;
  }
  // The pipeline is full after two rounds; a period is one round of `pp`.
  const int64_t round = strategy.layout.pp;
  const int64_t full = 4 * round + microbatches % round;
  if (microbatches <= full + round)
    return timed(strategy, stages, microbatches);
  const double begin = timed(strategy, stages, full);
  const double period = timed(strategy, stages, full + round) - begin;
  const double rounds = as_double(microbatches - full) / as_double(round);
  // With more microbatches another rank may become the busiest, and the period
  // does not show that. So the step is at least as long as the work of the
  // busiest rank.
  return std::max(
      begin + rounds * period,
      as_double(microbatches) * busiest_rank(strategy, stages));
}

}  // namespace echelon::cost
