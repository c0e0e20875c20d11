// Runs one step of all ranks' programs, event by event.
#pragma once

#include <cstdint>
#include <vector>

#include "echelon/schedule/schedule.h"
#include "echelon/simulator/rank_classes.h"
#include "echelon/simulator/rank_program.h"

namespace echelon::simulator {

/// A message from one stage to another, from one rank class to another.
struct Message {
  double seconds = 0;          // alone on its links
  std::vector<int32_t> links;  // that it uses
};

/// One rank class on the cluster.
struct SimulatedRank {
  const Program* program = nullptr;
  double slowness = 1;           // of all its computing
  uint64_t seed = 0;             // of its jitter
  std::vector<Message> forward;  // by stage of the rank
  std::vector<Message> backward;
};

/// The part of a job that stays the same over steps. Links are numbered from 0.
struct SimulatedJob {
  RankClasses classes;
  Schedule schedule;                              // by coordinate along pp
  std::vector<SimulatedRank> ranks;               // by class
  std::vector<std::vector<int32_t>> group_links;  // by group class
  std::vector<bool> group_shares;  // by group class: shares its links
  bool messages_share = false;     // messages share their links
  bool blocking_messages = false;  // sending blocks the rank
  /// Each rank begins its next step when its own is done: a step takes as long
  /// as its slowest rank (Framework).
  bool validates_afterwards = false;
  /// Background collectives slow computation down by this share of their time;
  /// the rank that waits for them pays.
  double overlap_slowdown = 0;
  size_t num_links = 0;
  double jitter = 0;  // of each operation's time, as a share
};

/// Sees what happens; called in any order of time.
class StepObserver {
 public:
  virtual ~StepObserver() = default;
  virtual bool wants(int32_t rank_class) const = 0;
  virtual void action(
      int32_t rank_class, const Action& action, double begin, double end) = 0;
  /// The update after the last action.
  virtual void optimizer(int32_t rank_class, double begin, double end) = 0;
  /// The collective runs in the background unless `blocking`.
  virtual void collective(
      int32_t rank_class, const Instruction& instruction, double begin,
      double end, bool blocking) = 0;
  virtual void wait_for(
      int32_t rank_class, const Instruction& launched, double begin,
      double end) = 0;
  virtual void message(
      int32_t from, int32_t to, const Action& producer, double bytes,
      double begin, double end) = 0;
  virtual void wait_for_message(
      int32_t rank_class, const Action& producer, double begin, double end) = 0;
};

struct StepRun {
  double seconds = 0;
  std::vector<RankStep> ranks;  // by class
  int64_t events = 0;
};

/// Length of a rank's step: its end, or its own seconds where ranks do not
/// meet.
double length_of(const SimulatedJob& job, const RankStep& rank);

/// Runs step number `step`, which has its own jitter, from 0 s.
StepRun run_step(
    const SimulatedJob& job, int64_t step, StepObserver* observer = nullptr);

}  // namespace echelon::simulator
