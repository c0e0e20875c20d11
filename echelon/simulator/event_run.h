// Runs one step of all ranks' programs, event by event.
//
// A rank goes on by itself until it has to wait: for the others of a
// collective, for a message of the pipeline, or for what it launched in the
// background. Only transfers that may share a link with others are events in
// order of time.
#pragma once

#include <cstdint>
#include <vector>

#include "echelon/schedule/schedule.h"
#include "echelon/simulator/rank_classes.h"
#include "echelon/simulator/running_rank.h"

namespace echelon::simulator {

/// A message from one stage to another, from one rank class to another.
struct Message {
  double seconds = 0;          // alone on its links
  std::vector<int32_t> links;  // that it takes
  bool inside = false;         // of a node
};

/// One rank class on the cluster.
struct SimulatedRank {
  const Program* program = nullptr;
  double slowness = 1;           // of all its computing
  uint64_t seed = 0;             // of its jitter
  double jitter_seconds = 0;     // of 1 ms of computing, measured
  std::vector<Message> forward;  // by stage of the rank
  std::vector<Message> backward;
};

/// Everything that stays the same over steps. Links are numbered from 0.
struct SimulatedJob {
  RankClasses classes;
  Schedule schedule;                              // by coordinate along pp
  std::vector<SimulatedRank> ranks;               // by class
  std::vector<std::vector<int32_t>> group_links;  // by group class
  std::vector<bool> group_shares;  // by group class: others may use its links
  bool messages_share = false;     // so may others use those of messages
  bool blocking_messages = false;  // a rank stands still while it sends
  /// Each rank begins its next step when its own is done: a step takes as long
  /// as the rank that is longest at it (Stack).
  bool validates_afterwards = false;
  /// Of computing, while something launched runs beside it: this much of the
  /// launched thing's time, paid by who waits for it.
  double overlap_slowdown = 0;
  size_t num_links = 0;
  double jitter = 0;  // of each operation, beside the ranks' own

  /// Its ranks were measured uneven.
  bool uneven() const;
};

/// Who wants to see what happens; called in any order of time.
class StepObserver {
 public:
  virtual ~StepObserver() = default;
  virtual bool wants(int32_t rank_class) const = 0;
  virtual void action(
      int32_t rank_class, const Action& action, double begin, double end) = 0;
  /// And what else is computed after the last action.
  virtual void optimizer(int32_t rank_class, double begin, double end) = 0;
  /// In the background when `stood_still` is false.
  virtual void collective(
      int32_t rank_class, const Instruction& instruction, double begin,
      double end, bool stood_still) = 0;
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

/// What the step is long for: the rank that ends last, or is longest at it.
double length_of(const SimulatedJob& job, const RankStep& rank);

/// Step number `step` (its jitter differs from that of others), from 0 s.
StepRun run_step(
    const SimulatedJob& job, int64_t step, StepObserver* observer = nullptr);

}  // namespace echelon::simulator
