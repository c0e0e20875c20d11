// Valid schedules of every kind, made by letting each rank compute, tick by tick,
// what is ready and comes first in an order of preference.
#pragma once

#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "echelon/schedule/schedule.h"

namespace echelon::schedules {

struct Style {
  bool backward_first = true;
  bool split = false;       // I and W instead of B
  int32_t in_flight = 0;    // forwards without backward, by stage; 0: any number
  bool fewer_later = false;  // one fewer for each stage, as in 1F1B
  uint32_t seed = 0;        // not 0: whatever is ready, at random
};

inline Schedule make(
    const std::string& name,
    const std::vector<int32_t>& rank_of_stage,
    int32_t num_ranks,
    int32_t num_microbatches,
    const Style& style) {
  Schedule schedule{name, num_microbatches, rank_of_stage, {}};
  schedule.ranks.resize(static_cast<size_t>(num_ranks));
  const int32_t num_stages = schedule.num_stages();
  std::map<std::string, int> done;  // tick
  std::mt19937 random(style.seed);
  const auto is_done = [&](const Action& action, int tick) {
    const auto found = done.find(to_string(action));
    return found != done.end() && found->second < tick;
  };
  const ActionKind gives = style.split ? ActionKind::backward_input
                                       : ActionKind::backward;
  const auto ready = [&](const Action& action, int tick) {
    const int32_t s = action.stage;
    const int32_t m = action.microbatch;
    switch (action.kind) {
      case ActionKind::forward: {
        if (s > 0 && !is_done({ActionKind::forward, s - 1, m}, tick)) {
          return false;
        }
        int32_t open = 0;
        for (int32_t i = 0; i < num_microbatches; ++i) {
          open += is_done({ActionKind::forward, s, i}, tick) &&
                  !is_done({gives, s, i}, tick);
        }
        int32_t limit = style.in_flight;
        if (style.fewer_later) limit = std::max(1, limit - s);
        return style.in_flight == 0 || open < limit;
      }
      case ActionKind::backward_weight:
        return is_done({gives, s, m}, tick);
      default:
        return is_done({ActionKind::forward, s, m}, tick) &&
               (s + 1 == num_stages || is_done({gives, s + 1, m}, tick));
    }
  };
  const size_t total = static_cast<size_t>(num_stages) * num_microbatches *
                       (style.split ? 3 : 2);
  for (int tick = 0; done.size() < total; ++tick) {
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      std::vector<Action> forwards, backwards, weights;
      for (int32_t m = 0; m < num_microbatches; ++m) {
        for (int32_t stage : schedule.stages_of(rank)) {
          const auto offer = [&](ActionKind kind, std::vector<Action>& to) {
            const Action action{kind, stage, m};
            if (done.count(to_string(action)) == 0 && ready(action, tick)) {
              to.push_back(action);
            }
          };
          offer(ActionKind::forward, forwards);
          offer(gives, backwards);
          if (style.split) offer(ActionKind::backward_weight, weights);
        }
      }
      std::vector<Action> order;
      const auto append = [&](const std::vector<Action>& more) {
        order.insert(order.end(), more.begin(), more.end());
      };
      if (style.backward_first) append(backwards);
      append(forwards);
      if (!style.backward_first) append(backwards);
      append(weights);
      if (order.empty()) continue;
      const size_t pick = style.seed == 0 ? 0 : random() % order.size();
      schedule.ranks[static_cast<size_t>(rank)].push_back(order[pick]);
      done[to_string(order[pick])] = tick;
    }
  }
  return schedule;
}

/// One stage per rank.
inline std::vector<int32_t> straight(int32_t num_ranks) {
  std::vector<int32_t> ranks;
  for (int32_t r = 0; r < num_ranks; ++r) ranks.push_back(r);
  return ranks;
}
/// Two per rank: 0 1 2 0 1 2.
inline std::vector<int32_t> looped(int32_t num_ranks) {
  std::vector<int32_t> ranks;
  for (int32_t s = 0; s < 2 * num_ranks; ++s) ranks.push_back(s % num_ranks);
  return ranks;
}
/// Two per rank: 0 1 2 2 1 0.
inline std::vector<int32_t> vee(int32_t num_ranks) {
  std::vector<int32_t> ranks;
  for (int32_t s = 0; s < 2 * num_ranks; ++s) {
    ranks.push_back(s < num_ranks ? s : 2 * num_ranks - 1 - s);
  }
  return ranks;
}

/// "gpipe", "1f1b", "split", "interleaved", "vee" (split) or "random".
inline Schedule named(const std::string& kind, int32_t p, int32_t m) {
  if (kind == "gpipe") {
    return make(kind, straight(p), p, m, {.backward_first = false});
  }
  if (kind == "1f1b") {
    return make(
        kind, straight(p), p, m, {.in_flight = p, .fewer_later = true});
  }
  if (kind == "split") {
    return make(
        kind, straight(p), p, m,
        {.split = true, .in_flight = p, .fewer_later = true});
  }
  if (kind == "interleaved") {
    return make(
        kind, looped(p), p, m, {.in_flight = 2 * p, .fewer_later = true});
  }
  if (kind == "vee") {
    return make(
        kind, vee(p), p, m,
        {.split = true, .in_flight = 2 * p, .fewer_later = true});
  }
  return make(
      kind, vee(p), p, m,
      {.split = true, .seed = static_cast<uint32_t>(10 * p + m)});
}

}  // namespace echelon::schedules
