// When each action of a schedule begins and ends, given the costs of stages.
#pragma once

#include <vector>

#include "echelon/schedule/schedule.h"

namespace echelon {

/// The times of one stage, in seconds or any other unit. The defaults are the
/// unit costs in which schedules are compared: F = I = W = 1, B = 2.
struct StageCost {
  double forward = 1;
  double backward = 2;         // B, whole
  double backward_input = 1;   // I
  double backward_weight = 1;  // W
  /// Sending its output to the next stage, and the next stage's gradient back,
  /// where another rank holds that stage. Transfers overlap with computation.
  double transfer = 0;
};

struct ActionTime {
  double begin = 0;
  double end = 0;
};

struct RankTiming {
  double begin = 0;  // of its first action
  double end = 0;    // of its last action
  double busy = 0;   // the sum of its actions
};

struct Timing {
  double makespan = 0;  // from 0 to the end of the last action
  /// Idle time of all ranks divided by ranks * makespan: the bubble of a step
  /// after which the ranks wait for each other.
  double bubble = 0;
  /// The same, with the longest time that a rank takes from its first action
  /// to its last in place of the makespan, as zero-bubble schedules count it:
  /// the bubble of steps that follow each other without waiting.
  double span_bubble = 0;
  std::vector<RankTiming> ranks;
  /// By rank, in the order of its list; empty unless asked for.
  std::vector<std::vector<ActionTime>> actions;

  /// The part of the makespan in which `rank` is idle.
  double rank_bubble(int32_t rank) const;
};

/// Each action begins when the one before it on its rank has ended and its
/// input has arrived. `schedule` is one that check() accepts. `costs` has an
/// item for each stage, none negative, or is empty for the defaults. Throws
/// ConfigError otherwise. Time grows with the number of actions.
Timing time_schedule(
    const Schedule& schedule, const std::vector<StageCost>& costs = {},
    bool with_actions = false);

}  // namespace echelon
