// A step: load a batch; forward and backward; one sum over all ranks of loss,
// counts, stop signals and the saver's news (StepSums); the update; the record;
// evaluation and saving where they are due. Every decision that all ranks must
// take alike (to stop, to save, to report a loss that is not finite) is made
// from these sums, so no rank does what the others do not.
#include "echelon/train/trainer.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "echelon/architecture/parameter_list.h"
#include "echelon/checkpoint/weights/checkpoint_tensors.h"
#include "echelon/comm/mesh_groups.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/train/memory_watch.h"
#include "echelon/train/report_writer.h"
#include "echelon/train/run_log.h"
#include "echelon/train/saving/resume.h"
#include "echelon/train/saving/saver.h"
#include "echelon/train/step_sums.h"

namespace echelon {
namespace {

std::atomic<int> stop_signals{0};
std::atomic<bool> terminated{false};

void on_stop_signal(int signal) {
  if (signal == SIGTERM) terminated = true;
  if (stop_signals.fetch_add(1) > 0) std::_Exit(128 + signal);
}

/// "; kept in runs/first: metrics.jsonl": what a run whose writing failed has
/// written until then.
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

/// Runs `write`, whose errors then also say what the folder has all the same.
template <class Write>
void keeping(const std::filesystem::path& folder, const Write& write) {
  try {
    write();
  } catch (const CommError&) {
    throw;
  } catch (const CheckpointError& error) {
    throw CheckpointError(error.what() + what_is_kept(folder));
  } catch (const Error& error) {
    throw Error(error.what() + what_is_kept(folder));
  } catch (const std::filesystem::filesystem_error& error) {
    throw Error(format(
        "cannot make {}: {}{}", error.path1().string(), error.code().message(),
        what_is_kept(folder)));
  }
}

// The first steps are not typical: buckets are laid out again after one step,
// and memory is allocated.
int64_t
first_recorded_step(const Job& job, const Resume& resume, int64_t total_steps) {
  const int64_t first =
      resume.candidates.empty() ? 0 : resume.candidates.front().step;
  return total_steps - first > job.train.timeline_steps + 3 ? first + 3 : first;
}

// Ranks that compute each layer together communicate several times a layer.
void warn_of_slow_links(
    const Layout& layout, const Mesh& mesh, int local_size) {
  const int64_t tp = layout.tp;
  if (mesh.within_hosts(Axis::tp, local_size)) return;
  Layout usual = layout;
  usual.order = kAxes;
  const bool by_order = Mesh(usual).within_hosts(Axis::tp, local_size);
  const std::string line = format(
      "warning: [layout] tp={}: a host has {} {}, so that some groups of {} "
      "span several hosts; tp is fast where its ranks share a host{}\n",
      tp, local_size, local_size == 1 ? "rank" : "ranks", tp,
      by_order ? ": name it last in [layout] order" : "");
  std::fputs(line.c_str(), stderr);
}

LoaderOptions
held_out_batches(LoaderOptions options, const TrainingData& data) {
  options.samples = data.holdout_samples;
  options.rank_batch.clear();
  options.shuffle = options.training = options.drop_last = false;
  return options;
}

// Records each collective as a span, and where a rank waited for it.
void record_collectives(
    World& world, std::shared_ptr<timeline::Recorder> recorder) {
  world.history().on_end([recorder](const CollectiveRecord& record) {
    if (!recorder->active()) return;
    timeline::Span span{
        .track = "comm",
        .name =
            record.operation + (record.label.empty() ? "" : " " + record.label),
        .kind = timeline::SpanKind::communication,
        .begin_ns = record.begin_ns,
        .end_ns = record.end_ns,
        .bytes = record.bytes,
        .axis = record.axis};
    recorder->add(span);
    // A pipeline records its own waits, with the actions that it waits for.
    if (record.wait_begin_ns == 0 || record.axis == "pp") return;
    span.track = "compute";
    span.name = "wait for " + span.name;
    span.begin_ns = record.wait_begin_ns;
    span.bytes = 0;
    span.axis.clear();
    recorder->add(std::move(span));
  });
}

void print_restored(
    const Resumed& resumed, const Resume& from, const Job& job,
    const std::string& samples, int64_t total_steps) {
  const CheckpointManifest& manifest = resumed.manifest;
  std::vector<std::string> lines = {format(
      "resumes from step {} of {}, saved with {} on {} {}", manifest.step,
      resumed.path.string(), manifest.layout, manifest.ranks,
      manifest.ranks == 1 ? "rank" : "ranks")};
  const auto add = [&](const std::string& line) {
    lines.push_back("  " + line);
  };
  if (from.instead_of_others) {
    add("the run has checkpoints of its own, and no longer needs " +
        job.checkpoint.resume);
  }
  for (const auto& line : resumed.lines) add(line);
  for (const auto& line : differences(manifest, job, samples, total_steps)) {
    add(line);
  }
  std::printf("%s\n", join(lines, "\n").c_str());
  std::fflush(stdout);
}

// The layers of a program are no model that a configuration can name.
Job as_saved(Job job, const LayerFactory& layers) {
  if (layers) job.model.name = kOwnModel;
  return job;
}

class Loop {
 public:
  Loop(
      const Job& job, World& world, std::filesystem::path folder,
      const LayerFactory& layers);
  TrainResult run();

 private:
  bool one_step(Position position);
  StepUpdate update(bool logged);
  void record(
      const StepSums& sums, Position position, const StepUpdate& update,
      bool logged, double started, double data_seconds);
  void restore();
  CheckpointManifest position_in_run() const;
  void save();
  void save_last();
  void say_saved(const std::filesystem::path& before);
  bool evaluation_due() const;
  void evaluate();
  [[noreturn]] void fail_numeric(const Batch& batch, const StepSums& sums);
  bool has_report() const;
  void write_outcome();
  double seconds() const {
    return static_cast<double>(timeline::steady_now_ns() - begin_ns_) * 1e-9;
  }
  bool is_rank_zero() const { return world_.rank() == 0; }
  bool evaluated() const { return log_.evaluated_step() == step_; }

  const Job job_;  // the model's name is the configuration's, or kOwnModel
  World& world_;
  std::filesystem::path folder_;
  MeshGroups groups_;
  TrainingData data_;
  Loader loader_;
  int64_t total_steps_;
  ModelSource source_;
  RunLayers run_layers_;             // rank 0; for predictions
  std::vector<std::string> layers_;  // names
  std::string samples_;              // describe_samples()
  Resume resume_;
  bool counts_tokens_;  // the objective's units; else they are samples
  std::shared_ptr<timeline::Recorder> recorder_;
  MemoryWatch memory_;
  TrainingState state_;
  std::optional<Saver> saver_;
  RunLog log_;
  int64_t begin_ns_ = timeline::steady_now_ns();
  int64_t step_ = 0;   // done
  Position position_;  // behind them
  bool stop_ = false;
  bool preempted_ = false;
  SaverNews news_;  // of the last step
  std::string save_error_;
  bool was_done_ = false;       // an earlier process has done all steps
  std::string resumed_;         // "step 69 (dp=2)"
  double earlier_seconds_ = 0;  // of earlier processes of this run
  int64_t saved_step_ = -1;     // by save_last()
  int64_t skipped_ = 0;         // samples
  int64_t skipped_steps_ = 0;   // that overflowed
};

Loop::Loop(
    const Job& job, World& world, std::filesystem::path folder,
    const LayerFactory& layers)
    : job_(as_saved(job, layers)),
      world_(world),
      folder_(std::move(folder)),
      groups_(world, job.layout),
      data_(open_data(job.data, job.train.seed)),
      loader_(*data_.train, training_batches(job, data_, groups_)),
      total_steps_(total_steps(job, loader_.batches_per_epoch())),
      source_(model_source(job, layers, data_.train->spec())),
      layers_(source_.layers.names()),
      samples_(describe_samples(job, data_)),
      resume_(find_resume(job, folder_)),
      counts_tokens_(is_text(source_.sample)),
      recorder_(std::make_shared<timeline::Recorder>(
          world.rank(), first_recorded_step(job, resume_, total_steps_),
          job.train.timeline_steps)),
      memory_(job, source_, world, groups_),
      state_(memory_.during(
          "the model is built",
          [&] {
            return TrainingState(
                job,
                {source_, world_, groups_, recorder_.get(),
                 [this](const std::string& line) {
                   if (is_rank_zero()) std::printf("%s\n", line.c_str());
                   std::fflush(stdout);
                 }},
                total_steps_);
          })),
      log_(world, folder_, job.train.log_every) {
  if (is_rank_zero()) {
    warn_of_slow_links(job.layout, groups_.mesh(), world_.local_size());
  }
  if (saves(job.checkpoint)) {
    saver_.emplace(job_, source_, world_, groups_, folder_, recorder_.get());
  }
  if (!resume_.candidates.empty()) restore();
  if (!is_rank_zero()) return;
  write_own_configuration(job_, folder_, layers != nullptr);
  run_layers_ =
      count_run_layers(job_, source_, world_, layers != nullptr, folder_);
  if (!resume_.own) log_.start_over();
  log_.open(total_steps_);
}

void Loop::restore() {
  const Resumed resumed =
      resume(resume_, job_, state_, source_, world_, groups_, samples_);
  const CheckpointManifest& from = resumed.manifest;
  step_ = from.step;
  if (resume_.own && saver_) saver_->resumed_from(step_, resumed.path);
  skipped_steps_ = from.skipped_steps;
  position_ = {from.epoch, from.consumed};
  resumed_ = format("step {} ({})", step_, from.layout);
  was_done_ = resume_.own && step_ >= total_steps_;
  if (is_rank_zero()) {
    print_restored(resumed, resume_, job_, samples_, total_steps_);
  }
  if (!resume_.own) return;
  log_.restore(step_);
  for (const auto& step : log_.steps()) earlier_seconds_ += step.step_seconds;
  for (const auto& one : log_.evaluations()) earlier_seconds_ += one.seconds;
}

TrainResult Loop::run() {
  // Collectives may end after a loop that an error ended.
  record_collectives(world_, recorder_);
  begin_ns_ = timeline::steady_now_ns();
  for (int64_t epoch = position_.epoch; step_ < total_steps_ && !stop_;
       ++epoch) {
    loader_.start_epoch(epoch);
    if (epoch == position_.epoch) loader_.seek(position_);
    while (step_ < total_steps_ && !stop_ && one_step(loader_.position())) {
      if (evaluation_due()) evaluate();
      save();
    }
  }
  if (is_rank_zero()) log_.flush();
  // A process that was asked to stop may have little time left.
  if (!stop_ && !evaluated()) evaluate();
  save_last();
  if (stop_ && !preempted_ && !evaluated()) evaluate();
  world_.history().on_end(nullptr);
  write_outcome();
  if (!save_error_.empty()) {
    throw CheckpointError(save_error_ + what_is_kept(folder_));
  }
  TrainResult result{
      .steps = step_, .interrupted = stop_, .preempted = preempted_};
  const auto& evaluations = log_.evaluations();
  if (!evaluations.empty()) result.evaluation = evaluations.back();
  return result;
}

// Nothing is counted as done before the update has succeeded. Returns false at
// the end of the epoch.
bool Loop::one_step(Position position) {
  recorder_->begin_step(step_);
  memory_.begin_step(*recorder_);
  const double started = seconds();
  std::optional<Batch> batch;
  {
    timeline::ScopedSpan span(
        recorder_.get(), "compute", "data wait", timeline::SpanKind::data);
    batch = loader_.next();
  }
  if (!batch) return false;
  const double loaded = seconds();
  const std::string place = "step " + std::to_string(step_ + 1);
  const Score score = memory_.during(place, [&] {
    return state_.model().forward_backward(*batch, counts_units(*data_.train));
  });
  const StepSums sums = share_sums(
      {.score = score,
       .skipped = batch->skipped,
       .work_seconds = seconds() - started,
       .stop = stop_signals.load() > 0,
       .terminated = terminated.load(),
       .saver = saver_ ? saver_->news() : SaverNews{}},
      world_);
  for (const auto& reason : batch->skip_reasons) {
    std::fprintf(stderr, "skipped a sample: %s\n", reason.c_str());
  }
  if (sums.bad_rank >= 0) fail_numeric(*batch, sums);
  const bool logged =
      (step_ + 1) % std::max<int64_t>(1, job_.train.log_every) == 0 ||
      step_ == 0;
  const StepUpdate update = this->update(logged);
  ++step_;
  stop_ = sums.stop;
  preempted_ = sums.preempted;
  news_ = sums.saver;
  skipped_ += static_cast<int64_t>(sums.skipped);
  position.consumed += batch->global_count;
  position_ = position;
  if (!update.updated) ++skipped_steps_;
  record(sums, position, update, logged, started, loaded - started);
  return true;
}

StepUpdate Loop::update(bool logged) {
  if (saver_) saver_->before_update();
  const bool by_layer = logged && job_.train.layer_norms;
  try {
    return state_.update(
        step_, logged, recorder_.get(), by_layer ? &layers_ : nullptr);
  } catch (const NumericError& error) {
    throw NumericError(format("step {}: {}", step_ + 1, error.what()));
  }
}

void Loop::record(
    const StepSums& sums, Position position, const StepUpdate& update,
    bool logged, double started, double data_seconds) {
  if (!is_rank_zero()) return;
  timeline::StepMetrics metrics;
  metrics.step = step_;
  metrics.epoch = static_cast<double>(position.epoch) +
                  static_cast<double>(position.consumed) /
                      static_cast<double>(data_.train_samples.size());
  metrics.loss = sums.count > 0 ? sums.loss_sum / sums.count : 0;
  metrics.step_seconds = seconds() - started;
  metrics.data_seconds = data_seconds;
  metrics.samples_per_second = sums.samples / metrics.step_seconds;
  if (counts_tokens_) {
    metrics.tokens_per_second = sums.count / metrics.step_seconds;
  }
  metrics.learning_rate = state_.optimizer().learning_rate();
  if (update.updated && (logged || update.norm > 0)) {
    metrics.grad_norm = update.norm;
  }
  if (update.loss_scale) {
    metrics.loss_scale = update.loss_scale;
    metrics.skipped_steps = skipped_steps_;
  }
  for (size_t i = 0; i < update.layer_norms.size(); ++i) {
    metrics.layer_grad_norms.emplace_back(layers_[i], update.layer_norms[i]);
  }
  if (sums.slowest_rank >= 0) metrics.slowest_rank = sums.slowest_rank;
  log_.add(metrics, sums);
}

bool Loop::evaluation_due() const {
  if (stop_ || evaluated()) return false;
  const int64_t every = job_.train.eval_every;
  return every > 0 ? step_ % every == 0 : loader_.at_end();
}

void Loop::evaluate() {
  if (data_.holdout_samples.empty()) return;
  const double started = seconds();
  Score score;
  {
    timeline::ScopedSpan span(
        recorder_.get(), "compute", "evaluation",
        timeline::SpanKind::evaluation);
    Loader loader(
        *data_.holdout,
        held_out_batches(training_batches(job_, data_, groups_), data_));
    while (const auto batch = loader.next()) {
      score += state_.model().evaluate(*batch);
    }
  }
  auto sums = torch::tensor(
                  {score.loss_sum, static_cast<double>(score.count),
                   static_cast<double>(score.correct),
                   static_cast<double>(score.samples)},
                  torch::kFloat64)
                  .to(world_.device());
  world_.group().all_reduce(sums, ReduceOp::sum, {.label = "evaluation"});
  const auto all = sums.to(torch::kCPU);
  const double* values = all.data_ptr<double>();
  timeline::EvaluationMetrics metrics;
  metrics.step = step_;
  metrics.epoch = log_.steps().empty() ? 0 : log_.steps().back().epoch;
  metrics.samples = static_cast<int64_t>(values[3]);
  metrics.loss = values[0] / values[1];
  metrics.accuracy = values[2] / values[1];
  metrics.seconds = seconds() - started;
  if (counts_tokens_) {
    metrics.tokens = static_cast<int64_t>(values[1]);
    metrics.perplexity = std::exp(metrics.loss);
  }
  log_.add(metrics);
}

void Loop::fail_numeric(const Batch& batch, const StepSums& sums) {
  std::string where = "the loss, though every layer's output is finite";
  if (const auto found = state_.model().find_nonfinite(batch)) {
    where = found->layer == "input"
                ? "the input batch"
                : format("layer {} ({})", found->layer, found->what);
  }
  where = world_.exchange(where)[static_cast<size_t>(sums.bad_rank)];
  throw NumericError(format(
      "step {}: the loss of rank {} is not a finite number; first NaN or "
      "infinity in {}. Parameters are those of step {}; lower [optimizer] "
      "learning_rate, set clip_norm, or look at the data{}",
      step_ + 1, sums.bad_rank, where, step_,
      job_.precision.compute == ComputeDtype::fp16
          ? ". Numbers of fp16 end at 65504; those of [precision] compute = "
            "\"bf16\" do not"
          : ""));
}

CheckpointManifest Loop::position_in_run() const {
  CheckpointManifest now;
  now.step = step_;
  now.skipped_steps = skipped_steps_;
  now.total_steps = total_steps_;
  now.epoch = position_.epoch;
  now.consumed = position_.consumed;
  now.data = samples_;
  if (!log_.steps().empty()) now.metrics["loss"] = log_.steps().back().loss;
  if (evaluated() && !log_.evaluations().empty()) {
    now.metrics["eval_loss"] = log_.evaluations().back().loss;
    now.metrics["eval_accuracy"] = log_.evaluations().back().accuracy;
  }
  return now;
}

void Loop::say_saved(const std::filesystem::path& before) {
  if (is_rank_zero() && saver_->last() != before) {
    log_.message("saved " + saver_->last().string());
  }
}

void Loop::save() {
  if (!saver_) return;
  const auto before = saver_->last();
  // A run that is resumed from there has the metrics of the steps before.
  if (is_rank_zero() && saver_->due(step_, news_)) log_.flush();
  saver_->after_step(state_, position_in_run(), news_);
  say_saved(before);
}

// An error is reported after everything else is written.
void Loop::save_last() {
  if (!saver_) return;
  const auto before = saver_->last();
  try {
    if (stop_ || job_.checkpoint.at_end) {
      saver_->save_and_wait(state_, position_in_run());
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
  const auto exists = [&](const char* name) {
    std::error_code error;
    return std::filesystem::exists(folder_ / name, error);
  };
  const bool here = exists("report.html") && exists("timeline.json");
  return world_.exchange(here ? "yes" : "no")[0] == "yes";
}

// The weights alone, as one file, and the report, unless no step was left and
// an earlier process has written one: it has the timeline.
void Loop::write_outcome() {
  if (is_rank_zero()) log_.finish();
  if (is_rank_zero() && saver_ && saved_step_ == step_) {
    keeping(folder_, [&] {
      std::vector<std::string> names;
      for (const auto& info : source_.parameters) names.push_back(info.name);
      CheckpointReader reader(saver_->last().string());
      write_weights(
          reader, (folder_ / "checkpoints/last.safetensors").string(), names);
    });
  }
  if (was_done_ && has_report()) return;
  RunSummary summary{
      .seconds = seconds(),
      .earlier_seconds = earlier_seconds_,
      .steps = log_.steps(),
      .evaluations = log_.evaluations(),
      .partition = state_.model().describe(),
      .memory = memory_.measured(),
      .skipped = skipped_,
      .skipped_steps = skipped_steps_,
      .resumed = resumed_,
      .layers = std::move(run_layers_)};
  if (stop_) {
    summary.outcome = preempted_ ? "stopped by SIGTERM" : "stopped by the user";
  }
  if (saver_) {
    summary.checkpoints = saver_->count();
    summary.checkpoint_seconds = saver_->stopped_seconds();
  }
  keeping(folder_, [&] {
    write_run_report(
        job_, source_, world_, folder_, recorder_->take(), summary);
  });
}

}  // namespace

void install_stop_signals() {
  install_save_signal();
  struct sigaction action {};
  action.sa_handler = on_stop_signal;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

TrainResult train(
    const Job& job, World& world, const std::filesystem::path& folder,
    const LayerFactory& layers) {
  at::set_num_threads(
      job.train.threads > 0 ? static_cast<int>(job.train.threads)
                            : world.compute_threads());
  try {
    return Loop(job, world, folder, layers).run();
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

}  // namespace echelon
