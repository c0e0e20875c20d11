// Schedules for tests: every kind that is generated, and valid ones in which
// each rank computes, tick by tick, anything that is ready.
#pragma once

#include <map>
#include <random>
#include <string>
#include <vector>

#include "echelon/schedule/options.h"
#include "echelon/schedule/schedule.h"

namespace echelon::schedules {

inline Schedule make_random(
    const std::vector<int32_t>& rank_of_stage, int32_t num_ranks,
    int32_t num_microbatches, bool split, uint32_t seed) {
  Schedule schedule{"random", num_microbatches, rank_of_stage, {}};
  schedule.ranks.resize(static_cast<size_t>(num_ranks));
  const int32_t num_stages = schedule.num_stages();
  std::map<std::string, int> done;  // tick
  std::mt19937 random(seed);
  const auto is_done = [&](const Action& action, int tick) {
    const auto found = done.find(to_string(action));
    return found != done.end() && found->second < tick;
  };
  const ActionKind gives =
      split ? ActionKind::backward_input : ActionKind::backward;
  const auto ready = [&](const Action& action, int tick) {
    const int32_t s = action.stage;
    const int32_t m = action.microbatch;
    switch (action.kind) {
      case ActionKind::forward:
        return s == 0 || is_done({ActionKind::forward, s - 1, m}, tick);
      case ActionKind::backward_weight:
        return is_done({gives, s, m}, tick);
      default:
        return is_done({ActionKind::forward, s, m}, tick) &&
               (s + 1 == num_stages || is_done({gives, s + 1, m}, tick));
    }
  };
  std::vector<ActionKind> kinds = {ActionKind::forward, gives};
  if (split) kinds.push_back(ActionKind::backward_weight);
  const size_t total =
      static_cast<size_t>(num_stages) * num_microbatches * kinds.size();
  for (int tick = 0; done.size() < total; ++tick) {
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      std::vector<Action> order;
      for (int32_t m = 0; m < num_microbatches; ++m) {
        for (int32_t stage : schedule.stages_of(rank)) {
          for (ActionKind kind : kinds) {
            const Action action{kind, stage, m};
            if (done.count(to_string(action)) == 0 && ready(action, tick)) {
              order.push_back(action);
            }
          }
        }
      }
      if (order.empty()) continue;
      const size_t pick = random() % order.size();
      schedule.ranks[static_cast<size_t>(rank)].push_back(order[pick]);
      done[to_string(order[pick])] = tick;
    }
  }
  return schedule;
}

/// 0 1 2 2 1 0.
inline std::vector<int32_t> vee(int32_t num_ranks) {
  std::vector<int32_t> ranks;
  for (int32_t s = 0; s < 2 * num_ranks; ++s) {
    ranks.push_back(s < num_ranks ? s : 2 * num_ranks - 1 - s);
  }
  return ranks;
}

/// One of schedule_names(), or "random": any order that is possible, with
/// backwards whole or (with an odd number of ranks) split.
inline Schedule named(const std::string& kind, int32_t p, int32_t m) {
  if (kind != "random") {
    return make_schedule(
        {.kind = schedule_kind(kind), .ranks = p, .microbatches = m});
  }
  return make_random(
      vee(p), p, m, p % 2 == 1, static_cast<uint32_t>(10 * p + m));
}

}  // namespace echelon::schedules
