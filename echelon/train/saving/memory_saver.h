// Copies training's state into memory that outlives this rank, while training
// continues (checkpoint/memory). A job that is restarted resumes from it.
//
//   MemorySaver saver(job, source, world, groups, recorder, index, …);
//   each step:
//     … forward and backward …
//     saver.finish();
//     all ranks learn that all have come so far, and of rank 0's wanted(step)
//     … the optimizer's update …
//     if it was wanted: saver.after_step(state, what_is_known);
//
// So no rank ends a step before all have written a copy that was begun before
// it: with a copy after each step, a job that is killed loses one step at most.
// A rank that fails to write does not disturb the others; the job then resumes
// from what all of them have. On several hosts, a copy goes to the next host
// too, beside the steps that follow. No other copy begins before all are there.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "echelon/checkpoint/format/manifest.h"
#include "echelon/checkpoint/memory/memory_slots.h"
#include "echelon/comm/mesh_groups.h"
#include "echelon/job/job.h"
#include "echelon/timeline/recorder.h"
#include "echelon/train/saving/restart_memory.h"
#include "echelon/train/saving/saved_state.h"
#include "echelon/train/strategies/step.h"

namespace echelon {

class MemorySaver {
 public:
  /// Borrows its arguments. Throws what MemorySlot throws.
  ///
  ///   memory      has an index
  ///   generation  of the job
  ///   kept_step   of the checkpoint in memory that training resumed from; -1:
  ///               none
  MemorySaver(
      const Job& job, const ModelSource& source, World& world,
      const MeshGroups& groups, timeline::Recorder* recorder,
      const RestartMemory& memory, int generation, int64_t kept_step);
  /// Waits for its threads.
  ~MemorySaver();
  MemorySaver(const MemorySaver&) = delete;
  MemorySaver& operator=(const MemorySaver&) = delete;

  /// Whether the state after `step` is to be copied: every so many steps, or
  /// when that has become worth its time. Rank 0's answer counts.
  bool wanted(int64_t step);

  /// Returns when the copy that was begun last is written on this host. No rank
  /// communicates.
  void finish();
  /// Whether the copy is still on its way to the next host: none may be begun.
  bool is_sending() const { return sending_; }
  /// As finish(), and returns when it is on the next host too.
  void wait();

  /// Begins to copy the state. `now` as for Saver::after_step. Warns when an
  /// earlier copy has failed, and copies nothing from then on.
  void after_step(TrainingState& state, const CheckpointManifest& now);

 private:
  void write(const CheckpointManifest& manifest);
  void send(const WrittenSlot& slot);
  void give_up(const std::string& error);

  const Job& job_;
  const ModelSource& source_;
  World& world_;
  const MeshGroups& groups_;
  timeline::Recorder* recorder_;
  const int generation_;
  MemorySlot slot_;
  std::unique_ptr<SlotSender> sender_;  // null: nothing is sent
  StateSnapshot snapshot_;
  std::thread thread_;
  // What the thread leaves; read when it has ended.
  std::string error_;
  int64_t busy_ns_ = 0;
  WrittenSlot written_;

  std::thread sending_thread_;
  bool sending_failed_ = false;  // read when the thread has ended
  std::atomic<bool> sending_ = false;
  std::atomic<int64_t> sending_ns_ = 0;

  bool failed_ = false;
  int64_t asked_ = -1;    // the last step that was wanted
  int64_t began_ns_ = 0;  // the last copy
  int64_t held_ns_ = 0;   // training, by the last copy
};

/// How long to go on between two copies of `cost_ns` each: the time that loses
/// least when faults come once an hour, sqrt(2 cost between_faults) (Young,
/// 1974, doi:10.1145/361147.361115), and at least 100 times the cost.
int64_t time_between_copies(int64_t cost_ns);

}  // namespace echelon
