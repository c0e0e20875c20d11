// A step: load a batch; forward and backward; one sum over all ranks of loss,
// counts, stop signals and the saver's news (StepSums); the update; the record;
// evaluation and saving where they are due. Every decision that all ranks must
// take alike (to stop, to save, to report a loss that is not finite) is made
// from these sums, so no rank does what the others do not.
//
// On a GPU the host only queues all of this. A step's numbers are copied to the
// host behind its update, and settle() reads them in the next step, when that
// one's backward is queued: the device never waits for the host. A step whose
// loss or norm is not finite is skipped by the device itself, and settle()
// decides whether the run goes on, or has to go back to an earlier state, which
// go_back() does between two steps. On a CPU, and before anything that looks at
// the state (evaluation, a comparison, a checkpoint, the end), settle() follows
// the step at once.
#include "echelon/train/trainer.h"
#include "echelon/report/report.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "echelon/architecture/language_model.h"
#include "echelon/architecture/parameter_list.h"
#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/weights/checkpoint_tensors.h"
#include "echelon/comm/mesh_groups.h"
#include "echelon/comm/trace/progress.h"
#include "echelon/environment/rank_environment.h"
#include "echelon/error.h"
#include "echelon/job/run_folder.h"
#include "echelon/layers/host_copy.h"
#include "echelon/profiling/event_clock.h"
#include "echelon/text/format.h"
#include "echelon/text/plain.h"
#include "echelon/text/units.h"
#include "echelon/timeline/rollback.h"
#include "echelon/train/chosen_precision.h"
#include "echelon/train/chosen_ways.h"
#include "echelon/train/device_batches.h"
#include "echelon/train/memory_watch.h"
#include "echelon/train/non_finite.h"
#include "echelon/train/rebalancing.h"
#include "echelon/train/record_collectives.h"
#include "echelon/train/replicas.h"
#include "echelon/train/report_writer.h"
#include "echelon/train/run_log.h"
#include "echelon/train/saving/memory_saver.h"
#include "echelon/train/saving/restart_memory.h"
#include "echelon/train/saving/resume.h"
#include "echelon/train/saving/saver.h"
#include "echelon/train/step_graphs.h"
#include "echelon/train/step_shots.h"
#include "echelon/train/step_sums.h"
#include "echelon/train/stop_signals.h"
#include "echelon/train/strategies/model_partition.h"

namespace echelon {
namespace {

// The first steps are not typical: buckets are laid out again after one step,
// and memory is allocated.
int64_t
first_recorded_step(const Job& job, const Resume& resume, int64_t total_steps) {
  const int64_t first =
      resume.candidates.empty() ? 0 : resume.candidates.front().step;
  return total_steps - first > job.train.timeline_steps + 3 ? first + 3 : first;
}

std::unique_ptr<timeline::DeviceTimer> device_timer_of(torch::Device device) {
  if (device.is_cpu()) return nullptr;
  return std::make_unique<profiling::EventTimer>(device.type());
}

timeline::MakeDeviceClock device_clock_of(torch::Device device) {
  if (device.is_cpu()) return nullptr;
  return [device] {
    return std::make_unique<profiling::EventClock>(device.type());
  };
}

const OwnParts& checked(const OwnParts& own, World& world) {
  check_same_data(own, world);
  return own;
}

std::vector<std::string>
mixtures_of(const Job& job, const ModelSource& source) {
  const auto shape = language_shape(job, source);
  return shape ? mixture_names(*shape) : std::vector<std::string>();
}

Window window_of(const timeline::Rollback& rollback) {
  return {
      {rollback.first.epoch, rollback.first.sample, {}},
      {rollback.end.epoch, rollback.end.sample, {}}};
}

class Loop {
 public:
  Loop(
      const Job& job, World& world, std::filesystem::path folder,
      const OwnParts& own, const TrainDoors& doors);
  ~Loop() { world_.history().count_into(nullptr); }
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;
  TrainResult run();
  /// After an error: records the step before, if the device has done it.
  void record_last() noexcept;

 private:
  // A step that the device has been given and the host has not read.
  struct Queued {
    int64_t step = 0;  // from 1
    Batch batch;
    Position position;  // behind it
    bool logged = false;
    double learning_rate = 0;
    double started = 0;  // seconds()
    double data_seconds = 0;
    double communication_seconds = 0;              // on CPUs
    std::vector<timeline::Recorder::Pass> passes;  // rank 0
    int64_t saver_phase = 0;  // when the saver's news were given
    HostCopy numbers;         // sum_over_ranks()'s, update_on_device()'s
  };

  // A step that was not finite, from which training goes back.
  struct GoingBack {
    timeline::Rollback rollback;  // without the state that it goes back to
    int64_t first_bad = 0;        // of the steps in a row
    std::string error;            // where it cannot go back
  };

  void build(const Job& job);
  void train_on();
  bool one_step();
  double waited_seconds() const {
    return static_cast<double>(world_.history().waited_ns()) / 1e9;
  }
  void settle();
  void go_back_or_fail(
      const Queued& queued, const std::string& why, const std::string& advice);
  void go_back();
  void discard_later();
  Resume save_for_change();
  void cut_anew();
  void
  record(const Queued& queued, const StepSums& sums, const StepUpdate& update);
  void record_experts(
      const Queued& queued, const StepSums& sums,
      timeline::StepMetrics& metrics);
  bool restore();
  void go_to(const CheckpointManifest& from);
  CheckpointManifest position_in_run() const;
  void compare_replicas();
  void save();
  void save_in_memory();
  void save_last();
  void say_saved(const std::filesystem::path& before);
  // The last steps were skipped, so that training may have to go back to before
  // them: nothing may take the place of the states from then.
  bool is_in_doubt() const {
    return job_.train.on_non_finite == OnNonFinite::rollback &&
           non_finite_.first_of(step_) < step_;
  }
  bool evaluation_due() const;
  void evaluate();
  std::string find_bad_loss(const Queued& queued, int64_t bad_rank);
  bool has_report() const;
  void write_outcome();
  double seconds() const {
    return static_cast<double>(timeline::steady_now_ns() - begin_ns_) * 1e-9;
  }
  /// Between two of seconds().
  timeline::Phase phase(const char* name, double begin, double end) const {
    return {
        name, begin_ns_ + std::llround(begin * 1e9),
        begin_ns_ + std::llround(end * 1e9)};
  }
  bool is_rank_zero() const { return world_.rank() == 0; }
  RestartMemory* memory() {
    return restart_memory_.index().empty() ? nullptr : &restart_memory_;
  }
  bool evaluated() const { return log_.evaluated_step() == step_; }

  const TrainDoors doors_;
  const OwnParts own_;
  const Job job_;  // with_own_names()
  World& world_;
  std::filesystem::path folder_;
  MeshGroups groups_;
  TrainingData data_;
  Loader loader_;
  int64_t total_steps_;
  ModelSource source_;
  RunLayers run_layers_;               // rank 0; for predictions
  RunWork work_;                       // rank 0
  std::vector<std::string> layers_;    // names
  std::vector<std::string> mixtures_;  // names
  bool told_of_drops_ = false;
  std::string samples_;  // describe_samples()
  const RankEnvironment environment_;
  ProgressMark progress_;
  RestartMemory restart_memory_;
  Resume resume_;
  bool counts_tokens_;  // the objective's units; else they are samples
  std::shared_ptr<timeline::Recorder> recorder_;
  MemoryWatch memory_;
  const DeviceBatches batches_;
  std::optional<TrainingState> state_;
  std::optional<StepGraphs> graphs_;  // of state_
  std::optional<Saver> saver_;
  std::optional<MemorySaver> memory_saver_;
  std::optional<ReplicaCheck> replicas_;
  int64_t compared_ = -1;  // the last step after which replicas were equal
  RunLog log_;
  std::optional<Rebalancing> rebalancing_;
  StepShots shots_;
  int64_t common_ns_ = 0;  // when all ranks had the same sums
  int64_t begin_ns_ = timeline::steady_now_ns();
  int64_t step_ = 0;   // done, or given to the device
  Position position_;  // behind them
  std::optional<Queued> queued_;
  double settled_ = 0;  // seconds() when the last step was read
  bool stop_ = false;
  bool preempted_ = false;
  SaverNews news_;              // of the last step that was read
  bool memory_wanted_ = false;  // by a step that was read
  int64_t memory_step_ = -1;    // of the newest copy
  std::string save_error_;
  bool was_done_ = false;      // an earlier process has done all steps
  std::string resumed_;        // "step 69 (dp=2)"
  int64_t saved_step_ = -1;    // by save_last()
  int64_t skipped_ = 0;        // samples
  int64_t skipped_steps_ = 0;  // whose loss or gradients were not finite
  NonFiniteSteps non_finite_;
  std::optional<GoingBack> back_;
  int64_t begun_ = 0;  // steps, also those that were undone
};

Loop::Loop(
    const Job& job, World& world, std::filesystem::path folder,
    const OwnParts& own, const TrainDoors& doors)
    : doors_(doors),
      own_(checked(own, world)),
      job_(with_own_names(job, own)),
      world_(world),
      folder_(std::move(folder)),
      groups_(mesh_groups(world, job)),
      data_(data_of(job, own)),
      loader_(*data_.train, training_batches(job, data_, groups_)),
      total_steps_(total_steps(job.train, loader_.batches_per_epoch())),
      source_(model_source(job, own, data_.train->spec())),
      layers_(source_.layers.names()),
      mixtures_(mixtures_of(job_, source_)),
      samples_(describe_samples(job, data_)),
      environment_(read_environment()),
      // Of ranks that are threads, rank 0 speaks for all.
      progress_(
          world.rank() == environment_.rank ? environment_.progress : "",
          environment_.local_rank),
      restart_memory_(
          world, environment_, job.elastic.memory != MemoryCopies::off),
      resume_(find_resume(job.checkpoint, folder_, memory())),
      counts_tokens_(source_.objective({})->counts_tokens()),
      recorder_(std::make_shared<timeline::Recorder>(
          world.rank(), first_recorded_step(job, resume_, total_steps_),
          job.train.timeline_steps, device_clock_of(world.device()))),
      memory_(job, source_, world, groups_),
      // Layers on several devices take their own parts.
      batches_(job.model.devices.empty() ? world.device() : torch::kCPU),
      log_(world, folder_, job.train.log_every),
      shots_(
          world, groups_.mesh(), *recorder_, folder_, job.train.watch_seconds),
      non_finite_(job.train.on_non_finite) {
  if (!world.device().is_cpu()) {
    // The images of a run have one shape: cuDNN tries its ways of convolving
    // them at their first batch, and keeps the fastest.
    at::globalContext().setBenchmarkCuDNN(is_image(data_.train->spec()));
  }
  const double began = seconds();
  build(job);
  const double build_seconds = seconds() - began;
  if (is_rank_zero()) {
    print_slow_links(job.layout, groups_.mesh(), world_.local_size());
  }
  if (saves(job.checkpoint)) {
    saver_.emplace(job_, source_, world_, groups_, folder_, recorder_.get());
  }
  const bool continued = !resume_.candidates.empty() && restore();
  for (const auto& one : log_.rollbacks()) loader_.leave_out(window_of(one));
  if (memory() != nullptr) {
    restart_memory_.go_on_from(environment_.generation, step_);
    memory_saver_.emplace(
        job_, source_, world_, groups_, recorder_.get(), restart_memory_,
        environment_.generation, step_);
  }
  if (Rebalancing::is_wanted(job_, world_)) {
    // A change of stages builds a model and takes about as long to load it.
    rebalancing_.emplace(
        job_, world_, groups_, state_->model().partition(),
        saver_ || memory_saver_, 2 * build_seconds, loader_, log_);
  }
  if (!is_rank_zero()) return;
  recorder_->time_parts(device_timer_of(world_.device()), [this] {
    return world_.history().waited_ns();
  });
  const bool own_layers = own_.layers.factory() != nullptr;
  write_own_configuration(job_, folder_, own_layers || own_.dataset != nullptr);
  run_layers_ = count_run_layers(job_, source_, world_, own_layers, folder_);
  if (!continued) log_.start_over();
  log_.open(total_steps_, job_);
  work_ = work_of_run(job_, source_, world_, run_layers_);
}

// `job`: the run's, perhaps with another cut into stages.
void Loop::build(const Job& job) {
  replicas_.reset();
  graphs_.reset();
  state_.reset();
  memory_.during("the model is built", [&] {
    state_.emplace(
        job,
        ModelPlace{
            source_, world_, groups_, recorder_.get(),
            [this](const std::string& line) {
              if (is_rank_zero()) std::printf("%s\n", line.c_str());
              std::fflush(stdout);
            }},
        total_steps_);
  });
  graphs_.emplace(
      job_, world_, *state_, *recorder_, [this](const std::string& line) {
        if (is_rank_zero()) log_.message(line);
      });
  if (job.train.check_replicas_every == 0) return;
  replicas_.emplace(world_, groups_, state_->model());
  if (!replicas_->has_replicas()) replicas_.reset();
}

// Returns whether the run's own training goes on.
bool Loop::restore() {
  const Resumed resumed =
      resume(resume_, job_, *state_, source_, world_, groups_, samples_);
  const CheckpointManifest& from = resumed.manifest;
  go_to(from);
  if (resumed.own && !resumed.in_memory && saver_) {
    saver_->resumed_from(step_, resumed.path);
  }
  resumed_ = format("step {} ({})", step_, from.layout);
  was_done_ = resumed.own && step_ >= total_steps_;
  if (is_rank_zero()) {
    std::printf(
        "%s\n",
        plain(describe(resumed, resume_, job_, samples_, total_steps_), "\n")
            .c_str());
    std::fflush(stdout);
  }
  if (resumed.own) log_.restore(step_);
  return resumed.own;
}

// The state of this step, which all ranks have saved: in memory, or where that
// did not succeed, on the disk.
Resume Loop::save_for_change() {
  Resume from;
  if (memory_saver_) {
    if (memory_step_ != step_) {
      memory_saver_->after_step(*state_, position_in_run());
    }
    memory_saver_->wait();
    memory_saver_.reset();
    world_.exchange("");  // nobody writes any more
    restart_memory_.collect();
    from = find_before(folder_, memory(), step_ + 1);
    if (from.in_memory > 0 && from.candidates.front().step == step_) {
      from.candidates.resize(1);
      from.in_memory = 1;
      return from;
    }
  }
  if (!saver_) return {};
  try {
    saver_->save_and_wait(*state_, position_in_run());
  } catch (const CheckpointError&) {
    return {};  // on every rank
  }
  from = find_before(folder_, nullptr, step_ + 1);
  from.candidates.resize(1);
  return from;
}

// Between two steps. The job goes on in the same processes: each saves its
// state, builds its new stage and loads what that needs.
void Loop::cut_anew() {
  const double began = seconds();
  progress_.pause();
  if (saver_) saver_->wait();
  news_ = {};
  const Resume from = save_for_change();
  const bool saved = !from.candidates.empty();
  bool in_memory = false;
  if (saved) {
    Job job = job_;
    job.model.partition_at = rebalancing_->new_cut();
    build(job);
    in_memory = resume(from, job_, *state_, source_, world_, groups_, samples_)
                    .in_memory;
  }
  if (memory() != nullptr) {
    memory_step_ = in_memory ? step_ : -1;
    memory_saver_.emplace(
        job_, source_, world_, groups_, recorder_.get(), restart_memory_,
        environment_.generation, memory_step_);
  }
  if (saved) {
    rebalancing_->cut_done(seconds() - began);
  } else {
    rebalancing_->cut_failed();
  }
  settled_ = seconds();
}

void Loop::go_to(const CheckpointManifest& from) {
  step_ = from.step;
  skipped_steps_ = from.skipped_steps;
  position_ = {from.epoch, from.consumed, stream_position(from)};
}

TrainResult Loop::run() {
  // Collectives may end after a loop that an error ended.
  record_collectives(world_, recorder_);
  world_.history().count_into(progress_.collectives());
  begin_ns_ = timeline::steady_now_ns();
  for (;;) {
    train_on();
    settle();
    if (!back_) break;
    go_back();
  }
  if (is_rank_zero()) log_.flush();
  // A process that was asked to stop may have little time left.
  if (!stop_ && !evaluated()) evaluate();
  save_last();
  if (stop_) ignore_stop_signals();
  if (stop_ && !preempted_ && !evaluated()) evaluate();
  world_.history().on_end(nullptr);
  world_.history().mark_with(nullptr);
  write_last_files(folder_, save_error_, [&] {
    write_outcome();
    if (is_rank_zero()) log_.flush_or_throw();
  });
  TrainResult result{
      .steps = step_, .interrupted = stop_, .preempted = preempted_};
  const auto& evaluations = log_.evaluations();
  if (!evaluations.empty()) result.evaluation = evaluations.back();
  return result;
}

// Until all steps are done, the process is asked to stop, or training has to go
// back.
void Loop::train_on() {
  for (int64_t epoch = position_.epoch;
       step_ < total_steps_ && !stop_ && !back_; ++epoch) {
    const int64_t before = step_;
    const bool whole = epoch != position_.epoch || position_.consumed == 0;
    if (epoch == position_.epoch) {
      loader_.seek(position_);
    } else {
      loader_.start_epoch(epoch);
    }
    while (step_ < total_steps_ && !stop_ && !back_ && one_step()) {
      progress_.pause();  // the rest may take any time
      if (evaluation_due()) settle();
      if (!back_ && evaluation_due()) evaluate();
      if (step_ % std::max<int64_t>(1, job_.train.check_replicas_every) == 0) {
        compare_replicas();
      }
      const double stood_still = saver_ ? saver_->stopped_seconds() : 0;
      const double began = seconds();
      if (!back_) save();
      const bool cuts = rebalancing_ && rebalancing_->wants_cut();
      if (cuts && !back_ && !stop_ && !is_in_doubt()) cut_anew();
      if (saver_ && saver_->stopped_seconds() > stood_still) {
        progress_.add_checkpoint(saver_->stopped_seconds() - stood_still);
        if (is_rank_zero()) log_.add(phase("checkpoint", began, seconds()));
      }
    }
    if (data_.train->is_stream() && job_.train.eval_every == 0 &&
        step_ < total_steps_ && !stop_ && !back_) {
      settle();
      if (!back_ && !stop_ && !evaluated()) evaluate();
    }
    if (whole && step_ == before && !stop_ && !back_ &&
        data_.train->is_stream()) {
      throw DataError(format(
          "epoch {} of the data's stream has no batch at all; an epoch needs "
          "{}",
          epoch, job_.data.drop_last ? "a full batch" : "a sample"));
    }
  }
}

// Returns false at the end of the epoch.
bool Loop::one_step() {
  // The timeline has each step once.
  recorder_->begin_step(step_ < begun_ ? -1 : step_);
  memory_.begin_step(*recorder_);
  const double started = seconds();
  const double waited = waited_seconds();
  const bool records = recorder_->active();
  const auto began = records ? recorder_->now() : timeline::Moment{};
  std::optional<Batch> batch = next_batch(loader_, *data_.train, &world_);
  // The next epoch begins with this step.
  if (!batch) return false;
  if (records) {
    recorder_->add(
        {.track = "compute",
         .name = "data wait",
         .kind = timeline::SpanKind::data},
        began, recorder_->now());
  }
  begun_ = std::max(begun_, step_ + 1);
  const Position position = loader_.position();
  progress_.advance();
  const double loaded = seconds();
  const std::string place = "step " + std::to_string(step_ + 1);
  state_->before_forward();
  const Score score = memory_.during(place, [&] {
    return graphs_->forward_backward(
        batches_.copy(*batch), counts_units(*data_.train, source_), records);
  });
  if (memory_saver_) memory_saver_->finish();
  progress_.advance();
  const int64_t saver_phase = saver_ ? saver_->phase_number() : 0;
  const double computed = seconds();
  // A rank that waits for a slower one does not work.
  double worked = computed - started - (waited_seconds() - waited);
  if (doors_.work_seconds) {
    worked = doors_.work_seconds(
        world_.rank(), step_ + 1, static_cast<int64_t>(batch->indices.size()));
  }
  const auto sums = sum_over_ranks(
      {.score = score,
       .skipped = batch->skipped,
       // On a device, its time is not known before the step is over.
       .work_seconds = world_.device().is_cpu() ? worked : 0,
       .stop = asked_to_stop(),
       .terminated = asked_by_sigterm(),
       .saver = saver_ ? saver_->news() : SaverNews{},
       .memory =
           memory_saver_ && is_rank_zero() && memory_saver_->wanted(step_ + 1),
       .memory_busy = memory_saver_ && memory_saver_->is_sending(),
       .record = is_rank_zero() && shots_.due(),
       .expert_counts = mixtures_.empty() ? torch::Tensor()
                                          : state_->model().expert_counts()},
      world_);
  if (world_.device().is_cpu()) common_ns_ = timeline::steady_now_ns();
  for (const auto& reason : batch->skip_reasons) {
    std::fprintf(stderr, "skipped a sample: %s\n", reason.c_str());
  }
  settle();  // the step before, whose error keeps this one from its update
  if (back_) {
    graphs_->update(
        step_, false, nullptr,
        torch::ones({}, torch::dtype(torch::kFloat32).device(world_.device())));
    return true;
  }
  progress_.advance();
  const bool logged =
      (step_ + 1) % std::max<int64_t>(1, job_.train.log_every) == 0 ||
      step_ == 0;
  if (saver_) saver_->before_update();
  const auto update = graphs_->update(
      step_, logged, job_.train.layer_norms ? &layers_ : nullptr,
      must_skip(sums, world_.size()));
  ++step_;
  position_ = position;
  queued_.emplace(Queued{
      .step = step_,
      .batch = std::move(*batch),
      .position = position,
      .logged = logged,
      .learning_rate = state_->optimizer().learning_rate(),
      .started = started,
      .data_seconds = loaded - started,
      .communication_seconds = waited_seconds() - waited,
      .passes = recorder_->take_passes(),
      .saver_phase = saver_phase,
      .numbers = HostCopy({sums, update})});
  if (world_.device().is_cpu()) settle();
  return true;
}

// Reads what the device computed in the last step that it was given, and acts
// on it. Returns at once when it has been read.
void Loop::settle() {
  if (!queued_) return;
  Queued queued = std::move(*queued_);
  queued_.reset();
  const auto& numbers = queued.numbers.wait();
  if (!world_.device().is_cpu()) common_ns_ = timeline::steady_now_ns();
  const StepSums sums = read_sums(numbers[0], world_.size());
  shots_.after_step(queued.step - 1, sums.record, common_ns_);
  stop_ = sums.stop;
  preempted_ = sums.preempted;
  if (sums.bad_rank >= 0 && !non_finite_.may_skip()) {
    return go_back_or_fail(
        queued, find_bad_loss(queued, sums.bad_rank),
        job_.precision.compute == ComputeDtype::fp16
            ? "set clip_norm, or look at the data. Numbers of fp16 end at "
              "65504; those of [precision] compute = \"bf16\" do not"
            : "set clip_norm, or look at the data");
  }
  if (sums.count == 0) throw DataError(no_units(counts_tokens_));
  const auto place = [&](const std::string& error) {
    return NumericError(format("step {}: {}", queued.step, error));
  };
  StepUpdate update;
  try {
    update = state_->read_update(numbers[1]);
  } catch (const NumericError& error) {
    throw place(error.what());
  }
  const bool bad_norm =
      sums.bad_rank < 0 && !update.updated && !update.loss_scale;
  const std::string what_is_bad = format(
      "the norm of the gradients is {}, though the loss is finite",
      format_number(update.norm));
  if (bad_norm && !non_finite_.may_skip()) {
    return go_back_or_fail(
        queued, what_is_bad + non_finite_.skipped_before(),
        "or look at the data");
  }
  // News from another phase of the saver says nothing about this one.
  const bool same_phase =
      saver_ && saver_->phase_number() == queued.saver_phase;
  news_ = same_phase ? sums.saver : SaverNews{};
  memory_wanted_ |= sums.memory;
  skipped_ += static_cast<int64_t>(sums.skipped);
  if (!update.updated) ++skipped_steps_;
  if (update.updated) non_finite_.on_update();
  if (bad_norm || sums.bad_rank >= 0) {
    const std::string warning = non_finite_.skip(
        queued.step,
        bad_norm
            ? what_is_bad
            : format(
                  "the loss of rank {} is not a finite number", sums.bad_rank));
    if (is_rank_zero()) log_.message(warning);
  }
  progress_.pause();  // whoever reads the terminal may take any time
  record(queued, sums, update);
  if (rebalancing_ && queued.batch.global_count == job_.train.batch) {
    rebalancing_->after_step(
        queued.step, sums.work_seconds, total_steps_ - queued.step);
  }
}

void Loop::record(
    const Queued& queued, const StepSums& sums, const StepUpdate& update) {
  // On a GPU the host begins a step before the last one has ended: the time
  // between two ends is that of the step.
  const double began = std::max(queued.started, settled_);
  settled_ = seconds();
  if (!is_rank_zero()) return;
  timeline::StepMetrics metrics;
  metrics.step = queued.step;
  metrics.epoch = static_cast<double>(queued.position.epoch);
  const auto epoch_samples =
      data_.train->is_stream()
          ? data_.train->size()
          : static_cast<int64_t>(data_.train_samples.size());
  if (epoch_samples > 0) {
    metrics.epoch += static_cast<double>(queued.position.consumed) /
                     static_cast<double>(epoch_samples);
  }
  metrics.loss = sums.bad_rank < 0 ? sums.loss_sum / sums.count : NAN;
  metrics.step_seconds = settled_ - began;
  metrics.data_seconds = queued.data_seconds;
  const timeline::Phase whole = phase("step", began, settled_);
  std::vector<timeline::Phase> phases = {
      phase("data", queued.started, queued.started + queued.data_seconds)};
  if (const auto parts = recorder_->parts_of(queued.passes, whole.end_ns)) {
    const auto& [forward, backward, update_part] = *parts;
    metrics.forward_seconds = forward.seconds;
    metrics.backward_seconds = backward.seconds;
    metrics.update_seconds = update_part.seconds;
    for (const auto& [name, part] :
         {std::pair{"forward", forward}, std::pair{"backward", backward},
          std::pair{"update", update_part}}) {
      if (part.end_ns == 0) continue;
      phases.push_back({name, part.begin_ns, part.end_ns, part.seconds});
    }
  }
  // On a device, the host does not wait for what it queues.
  if (world_.device().is_cpu() && world_.size() > 1) {
    metrics.communication_seconds = queued.communication_seconds;
  }
  metrics.samples_per_second = sums.samples / metrics.step_seconds;
  if (counts_tokens_) {
    metrics.tokens_per_second = sums.count / metrics.step_seconds;
  }
  metrics.learning_rate = queued.learning_rate;
  if (update.updated && (queued.logged || update.norm > 0)) {
    metrics.grad_norm = update.norm;
  }
  if (work_.step_flops > 0) {
    metrics.flops_per_second = work_.step_flops / metrics.step_seconds;
    if (work_.peak_flops > 0) {
      metrics.mfu = *metrics.flops_per_second / work_.peak_flops;
    }
  }
  if (queued.logged) metrics.peak_memory_bytes = peak_memory(world_.device());
  metrics.loss_scale = update.loss_scale;
  if (update.loss_scale || job_.train.on_non_finite != OnNonFinite::stop) {
    metrics.skipped_steps = skipped_steps_;
  }
  for (size_t i = 0; queued.logged && i < update.layer_norms.size(); ++i) {
    metrics.layer_grad_norms.emplace_back(layers_[i], update.layer_norms[i]);
  }
  if (!mixtures_.empty()) record_experts(queued, sums, metrics);
  if (sums.slowest_rank >= 0) metrics.slowest_rank = sums.slowest_rank;
  log_.add(metrics, sums, whole, phases);
  if (own_.on_step) own_.on_step(metrics);
}

// Loads of all experts are many numbers, so a run writes them about a hundred
// times, when other figures of a step are logged.
void Loop::record_experts(
    const Queued& queued, const StepSums& sums,
    timeline::StepMetrics& metrics) {
  constexpr int64_t kTimes = 100;
  constexpr double kToldShare = 0.1;
  auto loads = timeline::expert_loads(mixtures_, sums.expert_counts);
  metrics.expert_imbalance = timeline::imbalance_of(loads);
  if (job_.model.capacity_factor > 0) {
    const double share = timeline::dropped_share(loads);
    metrics.dropped_share = share;
    if (share > kToldShare && !std::exchange(told_of_drops_, true)) {
      log_.message(format(
          "warning: step {}: {} of the choices of experts were dropped, most "
          "of them by {}; raise [model] capacity_factor = {} or aux_loss. "
          "dropped_share in metrics.jsonl tells of later steps",
          queued.step, format_percent(share), timeline::most_dropped(loads),
          format_number(job_.model.capacity_factor)));
    }
  }
  const int64_t log_every = std::max<int64_t>(1, job_.train.log_every);
  const int64_t every =
      log_every * std::max<int64_t>(1, total_steps_ / kTimes / log_every);
  if (queued.step == 1 || queued.step % every == 0) {
    metrics.expert_loads = std::move(loads);
  }
}

void Loop::record_last() noexcept {
  try {
    if (!queued_ || !queued_->numbers.is_ready()) return;
    const auto sums = read_sums(queued_->numbers.wait()[0], world_.size());
    // Finding the layer of a bad loss would take all ranks.
    if (sums.bad_rank < 0 && sums.count > 0) settle();
  } catch (const std::exception&) {
    // The first error is the one to be told.
  }
}

bool Loop::evaluation_due() const {
  if (stop_ || evaluated()) return false;
  const int64_t every = job_.train.eval_every;
  if (every > 0) return step_ % every == 0;
  // Where a stream ends, ranks find out together (next_batch).
  return !data_.train->is_stream() && loader_.at_end();
}

void Loop::evaluate() {
  const bool streams =
      data_.holdout->is_stream() && data_.holdout != data_.train;
  if (data_.holdout_samples.empty() && !streams) return;
  graphs_->leave();
  const double started = seconds();
  const int64_t own_numbers = metric_numbers(source_.metrics);
  auto sums = torch::zeros(
      {Score::kNumbers + own_numbers},
      torch::dtype(torch::kFloat64).device(world_.device()));
  {
    timeline::ScopedSpan span(
        recorder_.get(), "compute", "evaluation",
        timeline::SpanKind::evaluation);
    Loader loader(*data_.holdout, held_out_batches(job_, data_, groups_));
    for (;;) {
      progress_.pause();
      const auto batch = next_batch(loader, *data_.holdout, &world_);
      progress_.advance(RankPhase::evaluation);
      if (!batch) break;
      sums +=
          state_->model().evaluate(*batch).sums(world_.device(), own_numbers);
    }
  }
  world_.group().all_reduce(sums, ReduceOp::sum, {.label = "evaluation"});
  const auto all = sums.to(torch::kCPU);
  progress_.pause();
  const double* values = all.data_ptr<double>();
  timeline::EvaluationMetrics metrics;
  metrics.step = step_;
  metrics.epoch = log_.steps().empty() ? 0 : log_.steps().back().epoch;
  metrics.samples = static_cast<int64_t>(values[3]);
  metrics.loss = values[0] / values[1];
  if (values[4] > 0) metrics.accuracy = values[2] / values[1];
  metrics.own =
      metric_values(source_.metrics, values + Score::kNumbers, metrics.samples);
  metrics.seconds = seconds() - started;
  if (counts_tokens_) {
    metrics.tokens = static_cast<int64_t>(values[1]);
    metrics.perplexity = std::exp(metrics.loss);
  }
  log_.add(metrics);
}

// The ranks look for the first layer.
std::string Loop::find_bad_loss(const Queued& queued, int64_t bad_rank) {
  graphs_->leave();
  std::string where = "the loss, though every layer's output is finite";
  if (const auto found = state_->model().find_nonfinite(queued.batch)) {
    where = found->layer == "input"
                ? "the input batch"
                : format("layer {} ({})", found->layer, found->what);
  }
  // The update that comes next writes what the look has begun to gather.
  state_->model().before_load();
  where = world_.exchange(where)[static_cast<size_t>(bad_rank)];
  return format(
      "the loss of rank {} is not a finite number{}; first NaN or infinity in "
      "{}",
      bad_rank, non_finite_.skipped_before(), where);
}

void Loop::go_back_or_fail(
    const Queued& queued, const std::string& why, const std::string& advice) {
  GoingBack back{
      .rollback =
          {.from_step = queued.step,
           .why = why,
           .end = {queued.position.epoch, queued.position.consumed}},
      .first_bad = non_finite_.first_of(queued.step),
      .error = format(
          "step {}: {}. Parameters are those of step {}; lower [optimizer] "
          "learning_rate, {}",
          queued.step, why, queued.step - 1, advice)};
  if (job_.train.on_non_finite != OnNonFinite::rollback) {
    throw NumericError(back.error);
  }
  if (!non_finite_.may_go_back(queued.step, log_.rollbacks())) {
    throw NumericError(format(
        "{}. Training went back {} times, with less than {} finite steps after "
        "each",
        back.error, NonFiniteSteps::kMostRollbacks, NonFiniteSteps::kBetween));
  }
  back_ = std::move(back);
}

// To the newest state from before the first of the bad steps in a row. If
// training went back to that one the last time too, to the one before: it may
// be what leads to bad steps.
void Loop::go_back() {
  GoingBack back = std::move(*back_);
  back_.reset();
  news_ = {};
  memory_wanted_ = false;
  progress_.pause();
  graphs_->leave();
  graphs_->drop();
  if (saver_) saver_->wait();
  if (memory_saver_) {
    memory_saver_.reset();
    world_.exchange("");  // nobody writes any more
    restart_memory_.collect();
  }
  Resume from = find_before(folder_, memory(), back.first_bad);
  const auto& before = log_.rollbacks();
  if (!before.empty() && from.candidates.size() > 1 &&
      from.candidates.front().step == before.back().step) {
    from.candidates.erase(from.candidates.begin());
    if (from.in_memory > 0) --from.in_memory;
  }
  if (from.candidates.empty()) {
    throw NumericError(
        back.error +
        ". No state from before was saved, to which training could go back; "
        "set [checkpoint] every_steps");
  }
  std::optional<Resumed> resumed;
  try {
    resumed = resume(from, job_, *state_, source_, world_, groups_, samples_);
  } catch (const CheckpointError& error) {
    throw NumericError(
        format("{}. Training could not go back: {}", back.error, error.what()));
  }
  go_to(resumed->manifest);
  back.rollback.step = step_;
  back.rollback.first = {position_.epoch, position_.consumed};
  log_.add(back.rollback);
  discard_later();
  if (memory() != nullptr) {
    memory_step_ = resumed->in_memory ? step_ : -1;
    memory_saver_.emplace(
        job_, source_, world_, groups_, recorder_.get(), restart_memory_,
        environment_.generation, memory_step_);
  }
  if (compared_ > step_) compared_ = -1;
  loader_.leave_out(window_of(back.rollback));
  non_finite_.on_update();
  settled_ = seconds();
  if (is_rank_zero()) {
    log_.message(format(
        "warning: step {}: {}; training goes back to step {} {}, and leaves "
        "out {}",
        back.rollback.from_step, back.rollback.why, step_,
        resumed->in_memory ? "in memory" : "of " + resumed->path.string(),
        timeline::samples_text(back.rollback)));
  }
}

// Training will save the steps of checkpoints that are later than this step
// again.
void Loop::discard_later() {
  const auto folder = folder_ / "checkpoints";
  if (is_rank_zero()) {
    if (saver_) saver_->discard_after(step_);
    for (const auto& place : list_checkpoints(folder)) {
      if (place.step <= step_) continue;
      log_.message(format(
          "warning: {} is now {}", place.path.string(),
          set_aside(place).filename().string()));
    }
  }
  if (memory() != nullptr) restart_memory_.discard(step_);
  world_.exchange("");  // no rank writes before that
  if (!saver_) return;
  const auto left = list_checkpoints(folder);
  if (left.empty()) {
    saver_->resumed_from(-1, {});
  } else {
    saver_->resumed_from(left.front().step, left.front().path);
  }
}

CheckpointManifest Loop::position_in_run() const {
  CheckpointManifest now;
  now.step = step_;
  now.skipped_steps = skipped_steps_;
  now.total_steps = total_steps_;
  now.epoch = position_.epoch;
  now.consumed = position_.consumed;
  now.data = with_position(samples_, position_.stream);
  // A step that was skipped may have no loss, and no best one.
  if (!log_.steps().empty() && std::isfinite(log_.steps().back().loss)) {
    now.metrics["loss"] = log_.steps().back().loss;
  }
  if (evaluated() && !log_.evaluations().empty()) {
    now.metrics["eval_loss"] = log_.evaluations().back().loss;
    if (const auto accuracy = log_.evaluations().back().accuracy) {
      now.metrics["eval_accuracy"] = *accuracy;
    }
  }
  return now;
}

// Copies in memory may hold what is wrong. Checkpoints on disk, which have
// parameters of all replicas, do not: a comparison comes before each.
void Loop::compare_replicas() {
  if (!replicas_ || compared_ == step_) return;
  settle();
  const auto difference = replicas_->compare();
  if (!difference) {
    compared_ = step_;
    return;
  }
  try {
    if (saver_) saver_->wait();  // what is being written was compared
  } catch (const CheckpointError&) {
    // The difference is the error to be told.
  }
  if (memory_saver_) {
    memory_saver_.reset();
    world_.exchange("");  // nobody writes any more
    restart_memory_.discard();
  }
  throw Error(divergence_text(
      step_, *difference, compared_,
      saver_ ? saver_->last().string() : std::string()));
}

void Loop::say_saved(const std::filesystem::path& before) {
  if (is_rank_zero() && saver_->last() != before) {
    const std::string& remote = job_.checkpoint.remote;
    log_.message(
        "saved " + saver_->last().string() +
        (remote.empty() ? "" : " and in " + remote));
  }
}

// A run that is resumed from there has the metrics of the steps before.
void Loop::save_in_memory() {
  if (!memory_saver_ || !memory_wanted_) return;
  settle();
  if (back_ || is_in_doubt()) return;
  memory_wanted_ = false;
  if (is_rank_zero()) log_.flush();
  memory_saver_->after_step(*state_, position_in_run());
  memory_step_ = step_;
}

void Loop::save() {
  save_in_memory();
  if (!saver_) return;
  const auto before = saver_->last();
  if (saver_->due(step_, news_)) {
    settle();
    compare_replicas();
  }
  if (back_) return;
  const SaverNews news = std::exchange(news_, {});
  if (is_in_doubt()) {
    saver_->after_step_in_doubt(news);
  } else {
    // A run that is resumed from there has the metrics of the steps before.
    if (is_rank_zero() && saver_->due(step_, news)) log_.flush();
    saver_->after_step(*state_, position_in_run(), news);
  }
  say_saved(before);
}

// An error is reported after everything else is written.
void Loop::save_last() {
  if (!saver_) {
    // The job may go on with another number of ranks.
    if (stop_ && memory_saver_ && memory_step_ != step_) {
      memory_wanted_ = true;
      save_in_memory();
      memory_saver_->wait();
    }
    return;
  }
  const auto before = saver_->last();
  if (stop_ || job_.checkpoint.at_end) compare_replicas();
  try {
    if (stop_ || job_.checkpoint.at_end) {
      saver_->save_and_wait(*state_, position_in_run());
      saved_step_ = step_;
    } else {
      saver_->wait();
    }
  } catch (const CheckpointError& error) {
    save_error_ = error.what();
  }
  say_saved(before);
}

// The same on all ranks.
bool Loop::has_report() const {
  const bool here = report::has_final_report(folder_);
  return world_.exchange(here ? "yes" : "no")[0] == "yes";
}

// The weights alone, as one file, and the report, unless no step was left and
// an earlier process has written one: it has the timeline.
void Loop::write_outcome() {
  if (is_rank_zero()) log_.finish();
  if (is_rank_zero() && saver_ && saved_step_ == step_) {
    std::vector<std::string> names;
    for (const auto& info : source_.parameters) {
      if (!source_.unsaved.contains(info.name)) names.push_back(info.name);
    }
    CheckpointReader reader(saver_->last().string());
    write_weights(
        reader, (folder_ / "checkpoints/last.safetensors").string(), names);
  }
  if (was_done_ && has_report()) return;
  RunSummary summary{
      .seconds = seconds(),
      .steps = log_.steps(),
      .evaluations = log_.evaluations(),
      .partition = state_->model().describe(),
      .memory = memory_.measured(),
      .skipped = skipped_,
      .skipped_steps = skipped_steps_,
      .rollbacks = log_.rollbacks(),
      .rebalances = log_.rebalances(),
      .resumed = resumed_,
      .layers = std::move(run_layers_)};
  if (stop_) {
    summary.outcome = preempted_ ? "stopped by SIGTERM" : "stopped by the user";
  }
  if (saver_) {
    summary.checkpoints = saver_->count();
    summary.checkpoint_seconds = saver_->stopped_seconds();
  }
  write_run_report(job_, source_, world_, folder_, recorder_->take(), summary);
}

}  // namespace

TrainResult train(const Job& job, World& world, const OwnParts& own) {
  RunFolder folder;  // locked as long as this exists
  if (world.rank() == 0) folder = make_run_folder(with_own_names(job, own));
  world.group().barrier();
  // Ranks on other hosts may not see the folder of rank 0.
  std::filesystem::create_directories(job.train.run);
  install_stop_signals();
  return train(job, world, job.train.run, own);
}

TrainResult train(
    const Job& job, World& world, const std::filesystem::path& folder,
    const OwnParts& own, const TrainDoors& doors) {
  at::set_num_threads(
      job.train.threads > 0 ? static_cast<int>(job.train.threads)
                            : world.compute_threads());
  Job chosen = job;
  chosen.precision = chosen_precision(with_own_names(job, own), world);
  chosen = with_chosen_ways(std::move(chosen), world);
  const StreamForGraphs stream(with_own_names(chosen, own), world);
  try {
    Loop loop(chosen, world, folder, own, doors);
    try {
      return loop.run();
    } catch (...) {
      loop.record_last();
      throw;
    }
  } catch (...) {
    throw;  // without a handler, the stack would not unwind and flush metrics
  }
}

TrainResult train(
    const Job& job, World& world, const std::filesystem::path& folder,
    const LayerList* layers) {
  return train(
      job, world, folder, layers ? whole_layers(*layers) : LayerFactory());
}

TrainResult train(
    const Job& job, World& world, const std::filesystem::path& folder,
    const LayerFactory& layers, const TrainDoors& doors) {
  return train(job, world, folder, OwnParts{.layers = layers}, doors);
}

}  // namespace echelon
