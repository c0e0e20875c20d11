// Saves training into the run's folder while it continues.
//
//   Saver saver(job, source, world, groups, folder, recorder);
//   each step:
//     sums += saver.news();                 // summed over all ranks
//     saver.before_update();
//     … the optimizer's update …
//     saver.after_step(state, what_is_known, sums);
//   at the end: saver.save_and_wait(…) or saver.wait()
//
// A checkpoint passes through three phases, and only one is in flight. Copying:
// every rank copies its state (unless training waits) while rank 0 makes the
// folder. Writing: every rank writes its file. Committing: rank 0 commits. With
// checkpoint.remote two more follow. Uploading: every rank uploads its file.
// Publishing: rank 0 makes the checkpoint visible on the storage. All of it
// runs next to training, whose update alone waits for the copy. A phase ends
// when the sums of a step say that all ranks have ended it (SaverNews).
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "echelon/checkpoint/format/manifest.h"
#include "echelon/checkpoint/remote/remote_checkpoints.h"
#include "echelon/comm/mesh_groups.h"
#include "echelon/error.h"
#include "echelon/job/job.h"
#include "echelon/text/format.h"
#include "echelon/timeline/recorder.h"
#include "echelon/train/saving/saved_state.h"
#include "echelon/train/strategies/step.h"

namespace echelon {

/// What a rank tells the others; summed over ranks.
struct SaverNews {
  double ready = 0;    // this rank has ended its part of the phase
  double failed = 0;   // this rank has failed in it
  double request = 0;  // a checkpoint is due: requested, or by time
};

class Saver {
 public:
  /// Every rank of the world makes one. Rank 0 takes the folder's lock. Throws
  /// CheckpointError that names the lock's owner, and ConfigError when not all
  /// ranks see the folder. With checkpoint.remote, rank 0 claims that place.
  /// Borrows its arguments.
  Saver(
      const Job& job, const ModelSource& source, World& world,
      const MeshGroups& groups, const std::filesystem::path& folder,
      timeline::Recorder* recorder);
  /// Waits for the writing thread. A checkpoint that is not committed is lost.
  ~Saver();
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

  /// Training was resumed from this checkpoint of the folder: its step is
  /// saved. Begins to upload it where the storage has only older ones.
  void resumed_from(int64_t step, const std::filesystem::path& path);

  /// Training went back to this step: later checkpoints on the storage no
  /// longer count. Rank 0 calls it, when nothing is in flight, before any
  /// checkpoint is set aside. Throws CheckpointError.
  void discard_after(int64_t step);

  /// This rank's news for the sums of a step. The next checkpoint answers the
  /// requests in it; later ones wait for the next news.
  SaverNews news();
  /// Changes with each phase, on all ranks alike. News that were given in
  /// another phase say nothing about this one: they are to be left out.
  int64_t phase_number() const { return phase_number_; }

  /// Call it before anything changes parameters or optimizer state: returns
  /// when this rank has copied them. No rank communicates.
  void before_update();

  /// Whether after_step would begin a checkpoint.
  bool due(int64_t step, const SaverNews& all) const;

  /// Every rank of the world calls this after a step's update. `all` is the sum
  /// of all ranks' news, `now` has the manifest's fields that say where
  /// training is (step, position, metrics). Begins a checkpoint when one is
  /// due, after the previous one has ended. Warns of failures; throws
  /// CheckpointError when too many failed in a row.
  void after_step(
      TrainingState& state, const CheckpointManifest& now,
      const SaverNews& all);

  /// The same for a step that is not to be saved: what is in flight goes on,
  /// and requests wait.
  void after_step_in_doubt(const SaverNews& all) { proceed(all); }

  /// Saves now, unless this step is saved already, and returns when the
  /// checkpoint is complete, however many failed before. Every rank calls this.
  /// Throws CheckpointError when it fails.
  void save_and_wait(TrainingState& state, const CheckpointManifest& now);
  /// Waits until nothing is being written. Every rank calls this. Throws as
  /// after_step.
  void wait();

  /// The newest complete checkpoint, which with checkpoint.remote is there too;
  /// empty: none yet.
  const std::filesystem::path& last() const { return done_; }
  /// How long training waited for checkpoints, and how many were begun.
  double stopped_seconds() const { return stopped_seconds_; }
  int64_t count() const { return count_; }

 private:
  enum class Phase {
    idle,
    copying,
    writing,
    committing,
    uploading,
    publishing
  };
  /// What follows when the checkpoint in flight fails.
  enum class Then { training, one_more, nothing };

  void require_shared_folder();
  void begin(TrainingState& state, const CheckpointManifest& now, bool async);
  void run(std::function<void()> work);
  void write();
  void commit();
  void claim_remote();
  void upload(std::vector<std::string> files);
  void upload_last();
  void publish();
  bool is_uploaded() const {
    return remote_ == nullptr || remote_step_ == last_step_;
  }
  void enter(Phase phase);
  void proceed(const SaverNews& all);
  void conclude(bool failed);
  void fail();
  SaverNews progress() const;
  SaverNews exchange();
  std::string copy(TrainingState& state, bool async);
  bool is_rank_zero() const { return world_.rank() == 0; }

  const Job& job_;
  const ModelSource& source_;
  World& world_;
  const MeshGroups& groups_;
  std::filesystem::path folder_;  // checkpoints/
  timeline::Recorder* recorder_;
  std::unique_ptr<RemoteCheckpoints> remote_;  // null: there is none
  std::string remote_mark_;                    // the same on all ranks
  std::string remote_name_;                    // of the checkpoint in flight
  int64_t remote_count_ = 0;                   // uploads begun
  int64_t remote_step_ = -1;                   // of the newest one there
  struct Background;
  std::unique_ptr<Background> background_;
  StateSnapshot snapshot_;
  CheckpointManifest manifest_;  // of the one in flight
  Phase phase_ = Phase::idle;
  int64_t phase_number_ = 0;
  std::chrono::steady_clock::time_point last_begin_;
  int64_t failures_ = 0;  // in a row
  std::string failure_;   // the last one, the same on all ranks
  Then then_ = Then::training;
  int told_ = 0;  // requests in the last news()
  int64_t last_step_ = -1;
  std::filesystem::path last_;  // committed in the folder
  std::filesystem::path done_;  // last()
  double stopped_seconds_ = 0;
  int64_t count_ = 0;
};

/// `now` with what a manifest says of the job and the state besides: layout,
/// seed, configuration, loss scale.
CheckpointManifest describe_state(
    CheckpointManifest now, const Job& job, const TrainingState& state);

/// Runs `write`, which writes the last files of a run. Throws its error and
/// before it `save_error`, why the last checkpoint failed, if it did: as a
/// CheckpointError then. The message ends with what `folder` has all the same:
/// "; kept in runs/first: metrics.jsonl".
void write_last_files(
    const std::filesystem::path& folder, const std::string& save_error,
    const std::function<void()>& write);

/// SIGUSR1 asks for a checkpoint after the current step.
void install_save_signal();

}  // namespace echelon
