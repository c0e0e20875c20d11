// The training thread runs the phases; at most one background thread does the
// slow work of the current one, and training waits for it only where it must.
//
//   idle -> copying -> writing -> committing -> idle
//                                 committing -> uploading -> publishing -> idle
//   any of these, where a rank failed -> idle
//
// The thread sets `done` last, so `error` is read without a lock after it. A
// rank moves on only in proceed(), when the summed news say that all ranks are
// done; so all ranks are in one phase at the start of a step. The work of the
// thread makes no collectives: those of training run beside it.
#include "echelon/train/saving/saver.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/files/folder_files.h"
#include "echelon/checkpoint/files/rank_file.h"
#include "echelon/checkpoint/files/reader.h"
#include "echelon/error.h"
#include "echelon/layout/layout.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

// Signals to the process, whose ranks may be threads. They are counted, since
// one may arrive at any time.
std::atomic<int> save_signals{0};
std::atomic<int> answered_signals{0};

void answer(int signals) {
  int before = answered_signals.load();
  while (before < signals &&
         !answered_signals.compare_exchange_weak(before, signals)) {
  }
}

void on_save_signal(int) {
  save_signals.fetch_add(1);
}

// Training will save these steps again, and nothing is overwritten.
void set_aside_incomplete(const std::filesystem::path& folder) {
  for (const auto& place : list_incomplete(folder)) {
    std::fprintf(
        stderr, "warning: %s has no manifest.json and is now %s\n",
        place.path.c_str(), set_aside(place).filename().c_str());
  }
}

KeepRule keep_rule(const CheckpointOptions& options) {
  KeepRule rule{.newest = options.keep};
  if (options.best != BestMetric::none) rule.best = to_string(options.best);
  rule.best_is_largest = options.best == BestMetric::eval_accuracy;
  return rule;
}

}  // namespace

// The thread of the current phase.
struct Saver::Background {
  ~Background() { join(); }
  void join() {
    if (thread.joinable()) thread.join();
  }

  std::thread thread;
  std::atomic<bool> done{true};
  std::atomic<bool> copied{true};        // the state may change
  std::string error;                     // read when done
  std::unique_ptr<CheckpointLock> lock;  // rank 0's
};

Saver::Saver(
    const Job& job, const ModelSource& source, World& world,
    const MeshGroups& groups, const std::filesystem::path& folder,
    timeline::Recorder* recorder)
    : job_(job),
      source_(source),
      world_(world),
      groups_(groups),
      folder_(folder / "checkpoints"),
      recorder_(recorder),
      background_(std::make_unique<Background>()),
      last_begin_(std::chrono::steady_clock::now()) {
  std::string error;
  if (is_rank_zero()) {
    try {
      background_->lock = std::make_unique<CheckpointLock>(folder_);
      set_aside_incomplete(folder_);
    } catch (const CheckpointError& refused) {
      error = refused.what();
    }
  }
  error = detail::first_failure(world_.exchange(error));
  if (!error.empty()) throw CheckpointError(error);
  if (world_.size() > 1) require_shared_folder();
  if (!job_.checkpoint.remote.empty()) claim_remote();
}

// Every rank uploads its file, so all of them must have keys.
void Saver::claim_remote() {
  std::string error, mark;
  try {
    remote_ = std::make_unique<RemoteCheckpoints>(job_.checkpoint.remote);
    if (is_rank_zero()) {
      mark = remote_->claim();
      const auto there = remote_->list();
      if (!there.empty()) mark += format(" {}", there.front().step);
    }
  } catch (const std::exception& refused) {
    error = refused.what();
  }
  error = detail::first_failure(world_.exchange(error));
  if (!error.empty()) throw CheckpointError(error);
  mark = world_.exchange(mark)[0];
  const size_t space = mark.find(' ');
  remote_mark_ = mark.substr(0, space);
  if (space != std::string::npos) remote_step_ = std::stoll(mark.substr(space));
}

// Without a shared folder, files of ranks on other hosts would be lost.
void Saver::require_shared_folder() {
  // The process number tells this sign from one that a killed process left.
  const auto sign =
      folder_ / (folder_files::kSeenByAll + std::to_string(::getpid()));
  if (is_rank_zero()) std::ofstream(sign).put('\n');
  const std::string path =
      world_.exchange(is_rank_zero() ? sign.string() : "")[0];
  const auto here = folder_ / std::filesystem::path(path).filename();
  std::error_code ignored;
  const bool seen = std::filesystem::exists(here, ignored);
  const auto blind = world_.exchange(seen ? "" : folder_.string());
  if (is_rank_zero()) std::filesystem::remove(sign, ignored);
  for (size_t rank = 0; rank < blind.size(); ++rank) {
    if (blind[rank].empty()) continue;
    throw ConfigError(format(
        "[train] run: rank {} does not see in its {} what rank 0 wrote; "
        "checkpoints need a folder that all hosts share: name one, or have "
        "none ([checkpoint] at_end = false, every_steps = 0, every_minutes = "
        "0)",
        rank, blind[rank]));
  }
}

Saver::~Saver() {
  if (remote_) remote_->cancel();
  background_->join();
  if (is_rank_zero() && phase_ != Phase::idle) {
    abandon_checkpoint(folder_, manifest_.step);
  }
}

void Saver::resumed_from(int64_t step, const std::filesystem::path& path) {
  last_step_ = step;
  last_ = path;
  done_ = path;
  remote_step_ = std::min(remote_step_, step);  // discard_after()
  if (remote_ && step > remote_step_) upload_last();
}

void Saver::discard_after(int64_t step) {
  if (remote_) remote_->discard_after(step);
}

SaverNews Saver::progress() const {
  SaverNews news;
  if (phase_ != Phase::idle && background_->done.load()) {
    (background_->error.empty() ? news.ready : news.failed) = 1;
  }
  return news;
}

SaverNews Saver::news() {
  SaverNews news = progress();
  told_ = save_signals.load();
  const auto& options = job_.checkpoint;
  const std::chrono::duration<double, std::ratio<60>> waited =
      std::chrono::steady_clock::now() - last_begin_;
  const bool time = is_rank_zero() && options.every_minutes > 0 &&
                    waited.count() >= options.every_minutes;
  if (time || told_ > answered_signals.load()) news.request = 1;
  return news;
}

SaverNews Saver::exchange() {
  const SaverNews own = progress();
  auto sums = torch::tensor({own.ready, own.failed}, torch::kFloat64)
                  .to(world_.device());
  world_.group().all_reduce(sums, ReduceOp::sum, {.label = "checkpoint"});
  const auto all = sums.to(torch::kCPU);
  return {all[0].item<double>(), all[1].item<double>(), 0};
}

bool Saver::due(int64_t step, const SaverNews& all) const {
  const int64_t every = job_.checkpoint.every_steps;
  return step != last_step_ &&
         (all.request > 0 || (every > 0 && step % every == 0));
}

void Saver::after_step(
    TrainingState& state, const CheckpointManifest& now, const SaverNews& all) {
  proceed(all);
  if (!due(now.step, all)) return;
  const auto started = std::chrono::steady_clock::now();
  {
    timeline::ScopedSpan span(
        recorder_, "compute", "checkpoint", timeline::SpanKind::other);
    wait();
    begin(state, now, job_.checkpoint.async);
    if (!job_.checkpoint.async) wait();
  }
  const std::chrono::duration<double> stopped =
      std::chrono::steady_clock::now() - started;
  stopped_seconds_ += stopped.count();
}

void Saver::before_update() {
  if (phase_ != Phase::copying || background_->copied.load()) return;
  const auto started = std::chrono::steady_clock::now();
  {
    timeline::ScopedSpan span(
        recorder_, "compute", "checkpoint copy", timeline::SpanKind::other);
    background_->copied.wait(false);
  }
  const std::chrono::duration<double> stopped =
      std::chrono::steady_clock::now() - started;
  stopped_seconds_ += stopped.count();
}

// Lets a checkpoint that is in flight end, whatever becomes of it, before it
// saves this step; only the failure of the last one is thrown.
void Saver::save_and_wait(TrainingState& state, const CheckpointManifest& now) {
  then_ = Then::one_more;
  wait();
  failure_.clear();
  if (now.step != last_step_) {
    then_ = Then::nothing;
    begin(state, now, false);
    wait();
  } else if (!is_uploaded()) {
    then_ = Then::nothing;
    upload_last();
    wait();
  }
  then_ = Then::training;
  if (!failure_.empty()) throw CheckpointError(failure_);
}

void Saver::wait() {
  while (phase_ != Phase::idle) {
    background_->join();
    proceed(exchange());
  }
}

void Saver::run(std::function<void()> work) {
  background_->join();
  background_->error.clear();
  background_->done = false;
  background_->thread = std::thread([this, work = std::move(work)] {
    try {
      work();
    } catch (const std::exception& error) {
      background_->error = error.what();
    }
    background_->done = true;
  });
}

void Saver::begin(
    TrainingState& state, const CheckpointManifest& now, bool async) {
  last_begin_ = std::chrono::steady_clock::now();
  // A signal that came after these asks for a checkpoint of its own.
  answer(told_);
  ++count_;
  manifest_ = describe_state(now, job_, state);
  const std::string failed = copy(state, async);
  auto bytes =
      torch::tensor({static_cast<double>(snapshot_.bytes())}, torch::kFloat64)
          .to(world_.device());
  world_.group().all_reduce(
      bytes, ReduceOp::sum, {.label = "checkpoint bytes"});
  enter(Phase::copying);
  background_->copied = false;
  run([this, failed, needed = bytes.item<int64_t>()] {
    if (failed.empty()) snapshot_.finish();
    background_->copied = true;
    background_->copied.notify_all();
    if (!failed.empty()) throw CheckpointError(failed);
    if (is_rank_zero()) begin_checkpoint(folder_, manifest_.step, needed);
  });
}

// The phase after copying, in which rank 0 has made the folder.
void Saver::write() {
  enter(Phase::writing);
  run([this] {
    const auto partial = partial_checkpoint(folder_, manifest_.step);
    write_rank_file(
        partial.string(), rank_file_name(world_.rank()), snapshot_.slices());
  });
}

void Saver::commit() {
  enter(Phase::committing);
  if (!is_rank_zero()) return;
  run([this] {
    commit_checkpoint(folder_, manifest_, world_.size());
    try {
      keep_checkpoints(folder_, keep_rule(job_.checkpoint));
    } catch (const CheckpointError& error) {
      // The new one is complete; the next one tries again.
      std::fprintf(
          stderr, "warning: an older checkpoint stays: %s\n", error.what());
    }
  });
}

// Uploads `files` of the newest checkpoint; the other ranks upload the others.
void Saver::upload(std::vector<std::string> files) {
  enter(Phase::uploading);
  remote_name_ = remote_name(last_step_, remote_mark_, ++remote_count_);
  run([this, files = std::move(files)] {
    for (const auto& file : files) remote_->upload(last_ / file, remote_name_);
  });
}

// A checkpoint that an earlier process has committed, of any number of ranks.
void Saver::upload_last() {
  std::vector<std::string> files;
  const CheckpointReader reader(last_.string());
  manifest_ = reader.manifest();
  for (size_t i = 0; i < manifest_.files.size(); ++i) {
    if (static_cast<int64_t>(i) % world_.size() != world_.rank()) continue;
    files.push_back(manifest_.files[i].name);
  }
  upload(std::move(files));
}

void Saver::publish() {
  enter(Phase::publishing);
  if (!is_rank_zero()) return;
  run([this] {
    remote_->publish(
        remote_name_, last_, keep_rule(job_.checkpoint),
        folder_.parent_path() / "metrics.jsonl");
  });
}

// Returns what went wrong instead of throwing: a rank without memory for the
// copy must not keep the others waiting.
std::string Saver::copy(TrainingState& state, bool async) {
  try {
    const auto parts = shards_to_save(state, source_, world_, groups_);
    async ? snapshot_.begin(parts) : snapshot_.refer_to(parts);
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

void Saver::enter(Phase phase) {
  phase_ = phase;
  ++phase_number_;
}

// Moves to the next phase when all ranks have ended this one; a failure on any
// rank ends the checkpoint on all.
void Saver::proceed(const SaverNews& all) {
  if (phase_ == Phase::idle ||
      all.ready + all.failed < static_cast<double>(world_.size())) {
    return;
  }
  background_->join();
  if (all.failed > 0) return conclude(true);
  switch (phase_) {
    case Phase::copying:
      return write();
    case Phase::writing:
      return commit();
    case Phase::committing:
      last_step_ = manifest_.step;
      last_ = checkpoint_path(folder_, manifest_.step);
      if (remote_) return upload({rank_file_name(world_.rank())});
      return conclude(false);
    case Phase::uploading:
      return publish();
    default:
      remote_step_ = last_step_;
      return conclude(false);
  }
}

void Saver::conclude(bool failed) {
  enter(Phase::idle);
  if (failed) return fail();
  failures_ = 0;
  done_ = last_;
}

void Saver::fail() {
  ++failures_;
  if (is_rank_zero()) abandon_checkpoint(folder_, manifest_.step);
  const bool only_here = last_step_ == manifest_.step;
  failure_ = format(
      "the checkpoint of step {} {}: {}", manifest_.step,
      only_here ? format(
                      "is in {}, but not in {}", last_.string(),
                      job_.checkpoint.remote)
                : "failed",
      detail::first_failure(world_.exchange(background_->error)));
  if (is_taken_over(failure_)) throw CheckpointError(failure_);
  if (then_ == Then::nothing) return;  // save_and_wait() tells
  const std::string count = std::to_string(failures_);
  const int64_t attempts = job_.checkpoint.attempts;
  if (then_ == Then::training && failures_ >= attempts) {
    throw CheckpointError(
        failure_ + "; the " + count +
        ". that failed in a row ([checkpoint] attempts)");
  }
  if (!is_rank_zero()) return;
  const std::string next =
      then_ == Then::one_more
          ? "a last one is tried now"
          : format(
                "training continues, the next interval tries again ({} of {})",
                count, attempts);
  std::fprintf(stderr, "warning: %s; %s\n", failure_.c_str(), next.c_str());
}

CheckpointManifest describe_state(
    CheckpointManifest now, const Job& job, const TrainingState& state) {
  now.layout = to_string(job.layout);
  now.seed = job.train.seed;
  now.config = to_toml(job);
  if (const auto& scaler = state.loss_scaler(); scaler.active()) {
    const auto scale = scaler.state();
    now.loss_scale =
        SavedLossScale{scale.scale, scale.good_steps, scale.overflows};
  }
  return now;
}

void install_save_signal() {
  struct sigaction action {};
  action.sa_handler = on_save_signal;
  action.sa_flags = SA_RESTART;
  sigaction(SIGUSR1, &action, nullptr);
}

namespace {

std::string what_is_kept(const std::filesystem::path& folder) {
  std::vector<std::string> kept;
  for (const char* name :
       {"metrics.jsonl", "checkpoints/last.safetensors", "timeline.json"}) {
    std::error_code ignored;
    if (std::filesystem::exists(folder / name, ignored)) kept.push_back(name);
  }
  if (const auto last = latest_checkpoint(folder / "checkpoints")) {
    kept.push_back("checkpoints/" + last->path.filename().string());
  }
  if (kept.empty()) return "";
  return format("; kept in {}: {}", folder.string(), join(kept, ", "));
}

}  // namespace

void write_last_files(
    const std::filesystem::path& folder, const std::string& save_error,
    const std::function<void()>& write) {
  std::vector<std::string> failed;
  bool of_checkpoint = !save_error.empty();
  if (of_checkpoint) failed.push_back(save_error);
  try {
    write();
  } catch (const CommError&) {
    throw;
  } catch (const DeviceError&) {
    throw;
  } catch (const CheckpointError& error) {
    failed.push_back(error.what());
    of_checkpoint = true;
  } catch (const Error& error) {
    failed.push_back(error.what());
  } catch (const std::filesystem::filesystem_error& error) {
    failed.push_back(format(
        "cannot make {}: {}", error.path1().string(), error.code().message()));
  }
  if (failed.empty()) return;
  const std::string message = join(failed, "; ") + what_is_kept(folder);
  if (of_checkpoint) throw CheckpointError(message);
  throw Error(message);
}

}  // namespace echelon
