// Visits a schedule's actions so that each comes after those that it needs: a
// rank's list proceeds whenever its next action has its input. The same walk
// times a schedule, runs it, and finds where it deadlocks.
#pragma once

#include <cstdint>
#include <vector>

#include "echelon/schedule/schedule.h"

namespace echelon::detail {

inline bool is_backward(ActionKind kind) {
  return kind == ActionKind::backward || kind == ActionKind::backward_input;
}

/// The stage whose result for the same microbatch `action` waits for: the
/// previous stage's output or the next stage's gradient. -1 where it waits for
/// none: forwards of the first stage, and W, which follows its I on the same
/// stage.
inline int32_t needed_stage(const Action& action, int32_t num_stages) {
  if (action.kind == ActionKind::forward) return action.stage - 1;
  if (!is_backward(action.kind)) return -1;
  return action.stage + 1 < num_stages ? action.stage + 1 : -1;
}

/// An index for each stage and microbatch.
inline size_t
cell(const Schedule& schedule, int32_t stage, int32_t microbatch) {
  return static_cast<size_t>(stage) * schedule.num_microbatches + microbatch;
}

class Walk {
 public:
  /// The actions of `schedule` name stages and microbatches that exist.
  explicit Walk(const Schedule& schedule)
      : schedule_(schedule),
        done_(cell(schedule, schedule.num_stages(), 0)),
        next_(schedule.ranks.size()),
        waiting_(schedule.ranks.size()) {}

  /// Calls visit(rank, index, action) for each action that can run; true when
  /// all could. Time grows with the number of actions alone.
  template <class Visit>
  bool run(Visit&& visit) {
    for (int32_t rank = schedule_.num_ranks() - 1; rank >= 0; --rank) {
      ready_.push_back(rank);
    }
    size_t visited = 0;
    size_t all = 0;
    for (const auto& list : schedule_.ranks) all += list.size();
    while (!ready_.empty()) {
      const int32_t rank = ready_.back();
      ready_.pop_back();
      visited += advance(rank, visit);
    }
    return visited == all;
  }

  /// Where `rank` stopped: an index into its list.
  size_t next(int32_t rank) const { return next_[static_cast<size_t>(rank)]; }

 private:
  static constexpr uint8_t kForward = 1;
  static constexpr uint8_t kBackward = 2;

  template <class Visit>
  size_t advance(int32_t rank, Visit& visit) {
    const auto& list = schedule_.ranks[static_cast<size_t>(rank)];
    size_t& next = next_[static_cast<size_t>(rank)];
    const size_t first = next;
    for (; next < list.size(); ++next) {
      if (!can_run(list[next])) {
        waiting_[static_cast<size_t>(rank)] = true;
        break;
      }
      visit(rank, next, list[next]);
      finish(list[next]);
    }
    return next - first;
  }

  bool can_run(const Action& action) const {
    const int32_t stage = needed_stage(action, schedule_.num_stages());
    if (stage < 0) return true;
    const uint8_t done = done_[cell(schedule_, stage, action.microbatch)];
    return done & (is_backward(action.kind) ? kBackward : kForward);
  }

  // Wakes the rank that waits for the result of `action`.
  void finish(const Action& action) {
    if (action.kind == ActionKind::backward_weight) return;
    const bool back = is_backward(action.kind);
    done_[cell(schedule_, action.stage, action.microbatch)] |=
        back ? kBackward : kForward;
    const int32_t stage = action.stage + (back ? -1 : 1);
    if (stage < 0 || stage >= schedule_.num_stages()) return;
    const int32_t rank = schedule_.rank_of_stage[static_cast<size_t>(stage)];
    const auto at = static_cast<size_t>(rank);
    if (waiting_[at] && can_run(schedule_.ranks[at][next_[at]])) {
      waiting_[at] = false;
      ready_.push_back(rank);
    }
  }

  const Schedule& schedule_;
  std::vector<uint8_t> done_;
  std::vector<size_t> next_;
  std::vector<bool> waiting_;
  std::vector<int32_t> ready_;
};

}  // namespace echelon::detail
