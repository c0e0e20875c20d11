#include "echelon/parallel/pipeline/transfer_plan.h"

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include "echelon/error.h"

namespace echelon::pipeline {
namespace {

struct Place {
  Action action;
  int32_t position = 0;
  int64_t turn = -1;  // in a run of the whole schedule
};

// Where each action is; B and I are both "the backward that sends".
class Places {
 public:
  explicit Places(const Schedule& schedule) : schedule_(schedule) {
    for (const auto& actions : schedule.ranks) {
      for (size_t i = 0; i < actions.size(); ++i) {
        if (actions[i].kind == ActionKind::backward_weight) continue;
        places_[key(
            actions[i].kind != ActionKind::forward, actions[i].stage,
            actions[i].microbatch)] = {actions[i], static_cast<int32_t>(i), -1};
      }
    }
    take_turns();
  }

  const Place& at(bool backward, int32_t stage, const Action& wanted_by) const {
    const auto found = places_.find(key(backward, stage, wanted_by.microbatch));
    if (found == places_.end()) {
      throw ConfigError(
          "schedule \"" + schedule_.name + "\": " + to_string(wanted_by) +
          " needs the " + (backward ? "backward" : "forward") + " of stage " +
          std::to_string(stage) + ", microbatch " +
          std::to_string(wanted_by.microbatch) + ", which no rank computes");
    }
    return found->second;
  }

 private:
  // Rank by rank, again and again, the next action of each that is ready.
  void take_turns() {
    std::vector<size_t> next(schedule_.ranks.size(), 0);
    int64_t turn = 0;
    for (bool any = true; any;) {
      any = false;
      for (size_t rank = 0; rank < next.size(); ++rank) {
        const auto& actions = schedule_.ranks[rank];
        if (next[rank] == actions.size()) continue;
        const Action& action = actions[next[rank]];
        if (!ready(action)) continue;
        any = true;
        ++next[rank];
        if (action.kind == ActionKind::backward_weight) continue;
        places_
            .at(
                key(action.kind != ActionKind::forward, action.stage,
                    action.microbatch))
            .turn = turn++;
      }
    }
  }

  bool ready(const Action& action) const {
    if (action.kind == ActionKind::backward_weight) return true;
    const bool backward = action.kind != ActionKind::forward;
    const int32_t stage = action.stage + (backward ? 1 : -1);
    if (stage < 0 || stage >= schedule_.num_stages()) return true;
    return at(backward, stage, action).turn >= 0;
  }

  uint64_t key(bool backward, int32_t stage, int32_t microbatch) const {
    return (static_cast<uint64_t>(stage) << 33) |
           (static_cast<uint64_t>(microbatch) << 1) | (backward ? 1 : 0);
  }

  const Schedule& schedule_;
  std::unordered_map<uint64_t, Place> places_;
};

class Planner {
 public:
  Planner(const Schedule& schedule, int32_t rank)
      : schedule_(schedule), rank_(rank), places_(schedule) {
    plan_.num_microbatches = schedule.num_microbatches;
  }

  TransferPlan run() {
    for (const auto& action : schedule_.ranks[static_cast<size_t>(rank_)]) {
      add(action);
    }
    for (auto& [peer, messages] : ordered_) {
      std::sort(
          messages.begin(), messages.end(),
          [](const auto& a, const auto& b) { return a.first < b.first; });
      auto& pair = plan_.pairs[peer];
      for (const auto& [turn, message] : messages) pair.push_back(message);
    }
    std::set<int32_t> seen;
    for (auto i = plan_.actions.rbegin(); i != plan_.actions.rend(); ++i) {
      const bool weights = i->action.kind == ActionKind::backward ||
                           i->action.kind == ActionKind::backward_weight;
      i->last_backward = weights && seen.insert(i->action.stage).second;
    }
    return std::move(plan_);
  }

 private:
  void add(const Action& action) {
    PlannedAction planned{.action = action};
    if (action.kind != ActionKind::backward_weight) {
      const bool backward = action.kind != ActionKind::forward;
      const int32_t step = backward ? -1 : 1;
      take_from(planned, action.stage - step, backward);
      give_to(planned, action.stage + step, backward);
    }
    plan_.actions.push_back(planned);
  }

  void take_from(PlannedAction& planned, int32_t stage, bool backward) {
    if (stage < 0 || stage >= schedule_.num_stages()) return;
    const Place& producer = places_.at(backward, stage, planned.action);
    const int32_t peer = schedule_.rank_of_stage[static_cast<size_t>(stage)];
    if (peer == rank_) {
      planned.from_here = true;
      return;
    }
    planned.incoming = static_cast<int32_t>(plan_.incoming.size());
    plan_.incoming.push_back({producer.action, peer, producer.position});
    ordered_[peer].push_back({producer.turn, {true, planned.incoming}});
  }

  void give_to(PlannedAction& planned, int32_t stage, bool backward) {
    if (stage < 0 || stage >= schedule_.num_stages()) return;
    const Place& consumer = places_.at(backward, stage, planned.action);
    const int32_t peer = schedule_.rank_of_stage[static_cast<size_t>(stage)];
    if (peer == rank_) {
      planned.to_here = true;
      return;
    }
    planned.outgoing = static_cast<int32_t>(plan_.outgoing.size());
    plan_.outgoing.push_back({planned.action, peer, consumer.position});
    ordered_[peer].push_back(
        {places_.at(backward, planned.action.stage, planned.action).turn,
         {false, planned.outgoing}});
  }

  const Schedule& schedule_;
  const int32_t rank_;
  const Places places_;
  std::map<int32_t, std::vector<std::pair<int64_t, PairMessage>>> ordered_;
  TransferPlan plan_;
};

}  // namespace

TransferPlan plan_transfers(const Schedule& schedule, int32_t rank) {
  return Planner(schedule, rank).run();
}

Schedule forward_schedule(
    const std::vector<int32_t>& rank_of_stage, int32_t num_ranks,
    int32_t num_microbatches) {
  Schedule schedule;
  schedule.name = "forward";
  schedule.num_microbatches = num_microbatches;
  schedule.rank_of_stage = rank_of_stage;
  schedule.ranks.resize(static_cast<size_t>(num_ranks));
  // A turn never decreases along the stages, so (turn, microbatch, stage) is an
  // order that respects what each forward needs.
  std::vector<int32_t> stages_seen(static_cast<size_t>(num_ranks), 0);
  std::map<int32_t, std::vector<int32_t>> stages_of_turn;
  int32_t turn = 0;
  for (int32_t stage = 0; stage < schedule.num_stages(); ++stage) {
    const auto rank = static_cast<size_t>(rank_of_stage[stage]);
    turn = std::max(turn, stages_seen[rank]++);
    stages_of_turn[turn].push_back(stage);
  }
  for (const auto& [_, stages] : stages_of_turn) {
    for (int32_t microbatch = 0; microbatch < num_microbatches; ++microbatch) {
      for (int32_t stage : stages) {
        schedule.ranks[static_cast<size_t>(rank_of_stage[stage])].push_back(
            {ActionKind::forward, stage, microbatch});
      }
    }
  }
  return schedule;
}

}  // namespace echelon::pipeline
