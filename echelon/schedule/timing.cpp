#include "echelon/schedule/timing.h"

#include <algorithm>

#include "echelon/error.h"
#include "echelon/schedule/walk.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

double cost_of(const Action& action, const StageCost& stage) {
  switch (action.kind) {
    case ActionKind::forward:
      return stage.forward;
    case ActionKind::backward:
      return stage.backward;
    case ActionKind::backward_input:
      return stage.backward_input;
    case ActionKind::backward_weight:
      return stage.backward_weight;
  }
  return 0;
}

void check_costs(
    const Schedule& schedule, const std::vector<StageCost>& costs) {
  if (costs.size() != schedule.rank_of_stage.size()) {
    throw ConfigError(format(
        "time_schedule: costs of {}, but the schedule has {}; give one "
        "for each",
        counted(std::ssize(costs), "stage"), schedule.rank_of_stage.size()));
  }
  for (size_t stage = 0; stage < costs.size(); ++stage) {
    const StageCost& cost = costs[stage];
    for (const double value :
         {cost.forward, cost.backward, cost.backward_input,
          cost.backward_weight, cost.transfer}) {
      if (value >= 0) continue;
      throw ConfigError(format(
          "time_schedule: stage {} has a cost of {:f}; costs must be at least "
          "0",
          stage, value));
    }
  }
}

void sum_up(Timing& timing) {
  double busy = 0;
  double longest = 0;
  for (const auto& rank : timing.ranks) {
    timing.makespan = std::max(timing.makespan, rank.end);
    longest = std::max(longest, rank.end - rank.begin);
    busy += rank.busy;
  }
  const auto part = [&](double time) {
    const double all = time * static_cast<double>(timing.ranks.size());
    return all > 0 ? std::max(0.0, 1 - busy / all) : 0.0;
  };
  timing.bubble = part(timing.makespan);
  timing.span_bubble = part(longest);
}

}  // namespace

double Timing::rank_bubble(int32_t rank) const {
  if (makespan <= 0) return 0;
  return std::max(0.0, 1 - ranks[static_cast<size_t>(rank)].busy / makespan);
}

Timing time_schedule(
    const Schedule& schedule, const std::vector<StageCost>& given,
    bool with_actions) {
  const auto costs = given.empty()
                         ? std::vector<StageCost>(schedule.rank_of_stage.size())
                         : given;
  check_costs(schedule, costs);
  Timing timing;
  timing.ranks.resize(schedule.ranks.size());
  if (with_actions) {
    for (const auto& list : schedule.ranks) {
      timing.actions.emplace_back(list.size());
    }
  }
  // By stage and microbatch.
  std::vector<double> forward_end(
      detail::cell(schedule, schedule.num_stages(), 0));
  std::vector<double> backward_end(forward_end.size());
  const auto& owners = schedule.rank_of_stage;
  // When the input of `action` has arrived.
  const auto arrival = [&](const Action& action) {
    const int32_t stage = detail::needed_stage(action, schedule.num_stages());
    if (stage < 0) return 0.0;
    const auto at = detail::cell(schedule, stage, action.microbatch);
    const bool back = detail::is_backward(action.kind);
    const double end = back ? backward_end[at] : forward_end[at];
    const auto a = static_cast<size_t>(action.stage);
    const auto b = static_cast<size_t>(stage);
    return owners[a] == owners[b] ? end : end + costs[std::min(a, b)].transfer;
  };
  detail::Walk walk(schedule);
  const bool whole =
      walk.run([&](int32_t rank, size_t index, const Action& action) {
        RankTiming& own = timing.ranks[static_cast<size_t>(rank)];
        const double begin = std::max(own.end, arrival(action));
        const double cost =
            cost_of(action, costs[static_cast<size_t>(action.stage)]);
        if (index == 0) own.begin = begin;
        own.end = begin + cost;
        own.busy += cost;
        const auto at = detail::cell(schedule, action.stage, action.microbatch);
        if (action.kind == ActionKind::forward) forward_end[at] = own.end;
        if (detail::is_backward(action.kind)) backward_end[at] = own.end;
        if (with_actions) {
          timing.actions[static_cast<size_t>(rank)][index] = {begin, own.end};
        }
      });
  if (!whole) {
    throw ConfigError(
        "schedule " + schedule.name +
        " deadlocks and has no timing; check() says where");
  }
  sum_up(timing);
  return timing;
}

}  // namespace echelon
