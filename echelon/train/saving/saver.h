// Saves training into the run's folder while it goes on.
//
//   Saver saver(job, source, world, groups, folder, recorder);
//   each step:
//     sums += saver.news();                 // summed over all ranks
//     saver.before_update();
//     … the optimizer's update …
//     saver.after_step(state, what_is_known, sums);
//   at the end: saver.save_and_wait(…) or saver.wait()
//
// A checkpoint goes through three phases, one at a time: every rank copies its
// state (unless training waits for it) while rank 0 makes the folder; every
// rank writes its file; rank 0 commits. All of it beside training, of which the
// update alone waits for the copy. Ranks learn how the others are doing by
// `news`, with the sums that a step has anyway.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "echelon/checkpoint/format/manifest.h"
#include "echelon/comm/mesh_groups.h"
#include "echelon/job/job.h"
#include "echelon/timeline/recorder.h"
#include "echelon/train/saving/saved_state.h"
#include "echelon/train/strategies/step.h"

namespace echelon {

/// What ranks tell each other, as summands.
struct SaverNews {
  double ready = 0;    // this rank has done its part of the phase
  double failed = 0;   // it could not
  double request = 0;  // a checkpoint is wanted: asked for, or it is time
};

class Saver {
 public:
  /// Every rank of the world makes one. Rank 0 takes the folder's lock. Throws
  /// CheckpointError that names its owner, and ConfigError when not all ranks
  /// see the folder. What is given outlives it.
  Saver(
      const Job& job, const ModelSource& source, World& world,
      const MeshGroups& groups, const std::filesystem::path& folder,
      Recorder* recorder);
  /// Waits for the writing thread; what is not committed is lost.
  ~Saver();
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

  /// Training goes on from this checkpoint of the folder: its step is saved.
  void goes_on_from(int64_t step, const std::filesystem::path& path);

  /// Of this rank, for the sums of a step. What it tells of a request is
  /// answered by the next checkpoint; one that comes later is told the next
  /// time.
  SaverNews news();

  /// Before anything changes parameters or the optimizer's state: returns when
  /// this rank's copy of them is made. No rank communicates.
  void before_update();

  /// Whether after_step would begin a checkpoint.
  bool due(int64_t step, const SaverNews& all) const;

  /// After a step's update. `all`: the news of all ranks, summed. `now`: the
  /// manifest's fields that say where training is (step, position, metrics,
  /// loss scale). Begins a checkpoint when one is due, waiting for the one
  /// before. Failures are warned of. Every rank of the world calls. Throws
  /// CheckpointError when too many failed in a row.
  void after_step(
      TrainingState& state, const CheckpointManifest& now,
      const SaverNews& all);

  /// Writes one now, unless one of this step is there, and returns when it is
  /// whole; also when those before it failed, whatever their number. Every rank
  /// calls. Throws CheckpointError when it fails.
  void save_and_wait(TrainingState& state, const CheckpointManifest& now);
  /// Until nothing is being written. Every rank calls. Throws as after_step.
  void wait();

  /// The newest whole one; empty: none yet.
  const std::filesystem::path& last() const { return last_; }
  /// How long training stood still for checkpoints, and how many began.
  double stopped_seconds() const { return stopped_seconds_; }
  int64_t count() const { return count_; }

 private:
  enum class Phase { idle, copying, writing, committing };
  /// What follows when the one in flight fails.
  enum class Then { training, one_more, nothing };

  void require_shared_folder();
  void begin(TrainingState& state, const CheckpointManifest& now, bool beside);
  void run(std::function<void()> work);
  void write();
  void commit();
  void proceed(const SaverNews& all);
  void conclude(bool failed);
  void fail();
  SaverNews progress() const;
  SaverNews exchange();
  std::string copy(TrainingState& state, bool beside);
  bool first() const { return world_.rank() == 0; }

  const Job& job_;
  const ModelSource& source_;
  World& world_;
  const MeshGroups& groups_;
  std::filesystem::path folder_;  // checkpoints/
  Recorder* recorder_;
  struct Background;
  std::unique_ptr<Background> background_;
  StateSnapshot snapshot_;
  CheckpointManifest manifest_;  // of the one in flight
  Phase phase_ = Phase::idle;
  std::chrono::steady_clock::time_point last_begin_;
  int64_t failures_ = 0;  // in a row
  std::string failure_;   // the last one, the same on all ranks
  Then then_ = Then::training;
  int told_ = 0;  // requests, in the last news()
  int64_t last_step_ = -1;
  std::filesystem::path last_;
  double stopped_seconds_ = 0;
  int64_t count_ = 0;
};

/// SIGUSR1 asks for a checkpoint after the current step.
void install_save_signal();

}  // namespace echelon
