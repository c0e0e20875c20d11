#include "echelon/watch/run_watch.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <thread>
#include <utility>

#include "echelon/checkpoint/files/folder.h"
#include "echelon/error.h"
#include "echelon/explain/explain.h"
#include "echelon/job/job.h"
#include "echelon/monitoring/growing_file.h"
#include "echelon/text/file_descriptor.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"
#include "echelon/timeline/last_step.h"

namespace echelon::watch {
namespace {

namespace fs = std::filesystem;

constexpr size_t kRecent = 50;       // steps of a mean
constexpr int64_t kEnd = 256 << 10;  // of a long file, read whole
constexpr int64_t kLong = 16 << 20;  // of such a file, samples are read
constexpr int64_t kSampleBytes = 16 << 10;
constexpr int kSamples = 256;
constexpr int64_t kMostExplained = 64 << 20;
constexpr double kFresh = 10;  // seconds between two words of a launcher
constexpr double kQuiet = 120;
constexpr std::chrono::seconds kBetweenFindings{30};
constexpr size_t kMostRuns = 1000;

double since(fs::file_time_type time) {
  const auto age = fs::file_time_type::clock::now() - time;
  return std::max(0.0, std::chrono::duration<double>(age).count());
}

std::optional<double> age_of(const fs::path& path) {
  std::error_code error;
  const auto time = fs::last_write_time(path, error);
  if (error) return std::nullopt;
  return since(time);
}

double now_seconds() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

std::string own_host() {
  char name[256] = "";
  ::gethostname(name, sizeof name - 1);
  return name;
}

// Of several jobs that the run has had, the newest.
const monitoring::RunStatus*
coordinator_of(const std::vector<monitoring::RunStatus>& statuses) {
  const monitoring::RunStatus* found = nullptr;
  for (const auto& one : statuses) {
    if (!one.coordinates) continue;
    if (found == nullptr || one.time > found->time) found = &one;
  }
  return found;
}

std::string first_line_of(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

}  // namespace

RunWatch::RunWatch(fs::path run, WatchOptions options)
    : folder_(std::move(run)), options_(options) {
  view_.path = folder_.string();
  const fs::path normal = folder_.lexically_normal();
  view_.name = (normal.has_filename() ? normal : normal.parent_path())
                   .filename()
                   .string();
}

const RunView& RunWatch::look() {
  view_.note.clear();
  read_configuration();
  read_metrics();
  read_checkpoint();
  add_means();
  read_status();
  add_eta();
  if (options_.last_step) read_last_step();
  if (options_.findings) read_findings();
  looked_ = true;
  return view_;
}

void RunWatch::read_configuration() {
  const fs::path path = folder_ / "config.toml";
  std::error_code error;
  const auto time = fs::last_write_time(path, error);
  if (error || configured_ == time) return;
  configured_ = time;
  try {
    const Job job = load_job(path.string());
    view_.title = job.model.name + " on " + to_string(job.data.name);
    view_.layout = to_string(job.layout);
    steps_ = job.train.steps;
    epochs_ = job.train.epochs;
  } catch (const Error& failure) {
    view_.note = first_line_of(failure.what());
  }
}

void RunWatch::restart_metrics() {
  read_ = 0;
  last_line_.clear();
  recent_.clear();
  epoch_steps_.reset();
  view_.last.reset();
  view_.evaluation.reset();
  view_.losses = view_.speeds = {};
}

void RunWatch::read_metrics() {
  const fs::path path = folder_ / "metrics.jsonl";
  const FileDescriptor file(
      ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (!file.is_open() || ::fstat(file.fd(), &status) != 0 ||
      !S_ISREG(status.st_mode)) {
    if (errno == EACCES) {
      view_.note = path.string() + ": you may not read it";
    }
    if (read_ > 0) restart_metrics();
    view_.quiet_seconds.reset();
    return;
  }
  view_.quiet_seconds = age_of(path);
  const auto size = static_cast<int64_t>(status.st_size);
  // Training that goes back to an earlier state removes the last lines.
  const auto known = static_cast<int64_t>(last_line_.size());
  if (read_ > size ||
      (known > 0 &&
       monitoring::read_at(file.fd(), read_ - known, known) != last_line_)) {
    restart_metrics();
  }
  if (read_ == 0 && (size > kLong || (options_.brief && size > kEnd))) {
    sample_metrics(file.fd(), size);
  }
  read_ = monitoring::read_lines(
      file.fd(), read_, size, [&](int64_t, std::string_view lines) {
        take(std::string(lines));
        const size_t end = lines.size() - 1;
        const size_t begin = end == 0 ? 0 : lines.rfind('\n', end - 1) + 1;
        last_line_ = lines.substr(begin);
      });
}

// Of a long file: some lines at equal distances, and what follows.
void RunWatch::sample_metrics(int file, int64_t size) {
  const int64_t last = size - kEnd;
  const int samples = options_.brief ? 0 : kSamples;
  for (int i = 0; i < samples; ++i) {
    const auto text =
        monitoring::read_at(file, last / samples * i, kSampleBytes);
    const size_t begin = i == 0 ? 0 : text.find('\n') + 1;
    const size_t end = text.rfind('\n');
    if (end != std::string::npos && end + 1 > begin) {
      take(text.substr(begin, end + 1 - begin));
    }
  }
  const auto text = monitoring::read_at(file, last, kEnd);
  const size_t line = text.find('\n');
  read_ =
      line == std::string::npos ? last : last + static_cast<int64_t>(line) + 1;
}

void RunWatch::take(const std::string& lines) {
  auto found = timeline::parse_metrics(lines);
  for (auto& step : found.steps) {
    const auto at = static_cast<double>(step.step);
    if (!step.simulated) view_.losses.add(at, step.loss);
    view_.speeds.add(at, step.samples_per_second);
    if (step.epoch >= 1 && step.epoch == std::floor(step.epoch)) {
      epoch_steps_ = step.step / static_cast<int64_t>(step.epoch);
    }
    recent_.push_back(step);
    if (recent_.size() > kRecent) recent_.pop_front();
    view_.last = std::move(step);
  }
  if (!found.evaluations.empty()) view_.evaluation = found.evaluations.back();
}

void RunWatch::add_means() {
  timeline::RecentSteps mean(static_cast<int64_t>(kRecent));
  double seconds = 0, data = 0;
  view_.flops_per_second.reset();
  view_.mfu.reset();
  for (const auto& step : recent_) {
    mean.add(step);
    seconds += step.step_seconds;
    data += step.data_seconds;
    if (step.flops_per_second) {
      view_.flops_per_second = view_.flops_per_second.value_or(0) +
                               *step.flops_per_second * step.step_seconds;
    }
    if (step.mfu) {
      view_.mfu = view_.mfu.value_or(0) + *step.mfu * step.step_seconds;
    }
  }
  view_.loss = view_.last && !std::isfinite(view_.last->loss) ? view_.last->loss
                                                              : mean.loss();
  view_.samples_per_second = mean.samples_per_second();
  view_.tokens_per_second = mean.tokens_per_second();
  view_.step_seconds =
      recent_.empty() ? 0 : seconds / static_cast<double>(recent_.size());
  view_.data_share = seconds > 0 ? data / seconds : 0;
  if (seconds > 0 && view_.flops_per_second) *view_.flops_per_second /= seconds;
  if (seconds > 0 && view_.mfu) *view_.mfu /= seconds;
  view_.total_steps = steps_;
  const auto& last = view_.last;
  if (steps_ == 0 && epoch_steps_) {
    view_.total_steps = epochs_ * *epoch_steps_;
  } else if (steps_ == 0 && last && last->epoch > 0) {
    // The last batch of an epoch may be smaller, so that this is about right.
    view_.total_steps = std::llround(
        static_cast<double>(epochs_) * static_cast<double>(last->step) /
        last->epoch);
  }
}

void RunWatch::add_eta() {
  view_.eta_seconds.reset();
  const auto& last = view_.last;
  if (view_.state == RunState::training && last &&
      view_.total_steps > last->step) {
    view_.eta_seconds = static_cast<double>(view_.total_steps - last->step) *
                        view_.step_seconds;
  }
}

void RunWatch::read_checkpoint() {
  view_.checkpoint.reset();
  try {
    const auto newest = latest_checkpoint(folder_ / "checkpoints");
    if (!newest) return;
    view_.checkpoint = Saved{newest->step, age_of(newest->path).value_or(0)};
  } catch (const Error& error) {
    view_.note = first_line_of(error.what());
  }
}

void RunWatch::read_status() {
  auto statuses = monitoring::read_statuses(folder_);
  const monitoring::RunStatus* first = coordinator_of(statuses);
  // Clocks of two hosts may differ: whether a launcher lives shows when it
  // writes again.
  if (first != nullptr && !looked_ && !options_.brief && !lives(*first) &&
      first->host != own_host() && !first->exit_code && !first->lost) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2500));
    statuses = monitoring::read_statuses(folder_);
    first = coordinator_of(statuses);
  }
  decide_state(first);
  view_.ranks.clear();
  if (first != nullptr) take_ranks(statuses, *first);
}

bool RunWatch::lives(const monitoring::RunStatus& status) {
  const auto now = Steady::now();
  if (status.beat != beat_) {
    if (beat_ != 0) beat_at_ = now;
    beat_ = status.beat;
  }
  const bool beats =
      beat_at_ && now - *beat_at_ < std::chrono::duration<double>(kFresh);
  return beats || std::abs(now_seconds() - status.time) < kFresh;
}

void RunWatch::decide_state(const monitoring::RunStatus* first) {
  view_.why.clear();
  view_.failure.clear();
  view_.restarts = 0;
  std::error_code error;
  if (first == nullptr) {
    if (!is_run(folder_)) {
      view_.state = RunState::not_begun;
      view_.why = fs::is_directory(folder_, error)
                      ? "the folder has nothing that a run writes"
                      : "there is no such folder yet";
      return;
    }
    view_.state = RunState::unknown;
    const bool all = view_.last && steps_ > 0 && view_.last->step >= steps_;
    if (all && fs::exists(folder_ / "report.html", error)) {
      view_.state = RunState::finished;
    } else if (view_.quiet_seconds && *view_.quiet_seconds < kQuiet) {
      view_.state = RunState::training;
      view_.why = "no launcher of Echelon says how its ranks are";
    } else {
      view_.why = "no launcher of Echelon says whether it goes on";
      if (view_.quiet_seconds) {
        view_.why += format(
            ", and it wrote last {} ago", format_seconds(*view_.quiet_seconds));
      }
    }
    return;
  }
  view_.failure = first->failure;
  view_.restarts = first->restarts;
  view_.num_hosts = first->num_hosts;
  if (first->exit_code) {
    const int code = *first->exit_code;
    if (code == 0) {
      view_.state = RunState::finished;
      view_.failure.clear();
    } else if (code == static_cast<int>(ExitCode::preempted)) {
      view_.state = RunState::stopped;
      view_.why = view_.checkpoint ? "the same command resumes it"
                                   : "it has no checkpoint to go on from";
    } else if (code == static_cast<int>(ExitCode::interrupted)) {
      view_.state = RunState::stopped;
      view_.why = "by the user";
    } else {
      view_.state = RunState::failed;
      view_.why = format("with exit code {}", code);
    }
    return;
  }
  const std::string ago =
      format_seconds(std::max(0.0, now_seconds() - first->time));
  if (first->lost) {
    view_.state = RunState::died;
    view_.why = format(
        "its launcher, process {} of {}, was killed {} ago", first->pid,
        first->host, ago);
    return;
  }
  if (!lives(*first)) {
    // Who can see the launcher's process knows.
    if (first->host == own_host() &&
        monitoring::process_name(first->pid) != first->process) {
      view_.state = RunState::died;
      view_.why = format(
          "its launcher, process {}, is gone, and wrote last {} ago",
          first->pid, ago);
      return;
    }
    view_.state = RunState::silent;
    view_.why = format(
        "its launcher, process {} of {}, wrote last {} ago{}", first->pid,
        first->host, ago,
        first->host == own_host() ? "" : ", by the clocks of two hosts");
    return;
  }
  // Steps of an earlier launcher say nothing of this one.
  const bool any_progress = std::ranges::any_of(
      first->ranks, [](const auto& rank) { return rank.progress > 0; });
  const bool wrote = view_.last && view_.quiet_seconds &&
                     *view_.quiet_seconds < first->time - first->started;
  view_.state = any_progress || wrote ? RunState::training : RunState::starting;
}

void RunWatch::take_ranks(
    const std::vector<monitoring::RunStatus>& statuses,
    const monitoring::RunStatus& coordinator) {
  const double patience = std::max(kFresh, 5 * view_.step_seconds);
  for (const auto& host : statuses) {
    // What an earlier job of the run left, with more hosts.
    if (host.generation != coordinator.generation) continue;
    const bool gone = std::abs(coordinator.time - host.time) > 60;
    for (const auto& rank : host.ranks) {
      if (rank.rank >= coordinator.world_size) continue;
      RankView one{.status = rank, .host = host.host, .state = {}};
      const double idle = rank.idle_seconds.value_or(0);
      if (is_over(view_.state) || !rank.up) {
        one.state = "ended";
        one.in_doubt = !is_over(view_.state);
      } else if (gone || view_.state == RunState::silent) {
        one.state = "not known";
        one.in_doubt = true;
      } else if (rank.progress == 0) {
        // Ranks of a job that may not restart say nothing.
        one.state = view_.state == RunState::training ? "lives" : "starts";
      } else if (rank.phase != "other" && idle > patience) {
        one.state = "no progress for " + format_seconds(idle);
        one.in_doubt = true;
      } else if (rank.phase == "evaluation") {
        one.state = "evaluates";
      } else if (rank.phase == "other" && idle > patience) {
        one.state =
            format("reads, saves or waits, for {}", format_seconds(idle));
      } else {
        one.state = "trains";
      }
      view_.ranks.push_back(std::move(one));
    }
  }
  std::ranges::sort(
      view_.ranks, {}, [](const RankView& one) { return one.status.rank; });
}

// The ranks write at nearly the same time: what is there a look later is whole.
void RunWatch::read_last_step() {
  const fs::path first = folder_ / timeline::last_step_file(0);
  std::error_code error;
  const auto written = fs::last_write_time(first, error);
  if (error) {
    view_.last_step.reset();
    shot_.reset();
    return;
  }
  const bool stable = !looked_ || seen_shot_ == written;
  seen_shot_ = written;
  if (view_.last_step) view_.last_step->age_seconds = since(*shot_);
  if (!stable || shot_ == written) return;
  shot_ = written;
  try {
    auto timeline = timeline::read_last_step(folder_);
    if (!timeline) return;
    LastStep last{
        .step = timeline->spans.front().step + 1,
        .age_seconds = since(written),
        .timeline = std::move(*timeline)};
    for (auto& span : last.timeline.spans) ++span.step;  // from 1, as shown
    last.diagnosis = timeline::diagnose(last.timeline);
    view_.last_step = std::move(last);
  } catch (const Error& failure) {
    view_.note = first_line_of(failure.what());
  }
}

void RunWatch::read_findings() {
  const auto now = Steady::now();
  const int64_t step = view_.last ? view_.last->step : -1;
  const bool due = !explained_ || now - *explained_ > kBetweenFindings ||
                   is_over(view_.state);
  std::error_code error;
  if (!due || step < 1 || step == explained_step_ ||
      fs::file_size(folder_ / "metrics.jsonl", error) >
          static_cast<uintmax_t>(kMostExplained)) {
    return;
  }
  explained_ = now;
  explained_step_ = step;
  view_.findings.clear();
  try {
    const auto run = explain::explain_run(folder_, {.simulation_seconds = 0.2});
    for (const auto& found : run.findings) {
      view_.findings.push_back(explain::title_of(found));
    }
  } catch (const std::exception&) {
    // There are too few steps for a finding.
  }
}

bool is_run(const fs::path& folder) {
  std::error_code error;
  for (const char* name :
       {"metrics.jsonl", "config.toml", "timeline.json", "checkpoints"}) {
    if (fs::exists(folder / name, error)) return true;
  }
  return false;
}

std::vector<fs::path> find_runs(const fs::path& folder) {
  constexpr int kDepth = 3;
  if (is_run(folder)) return {folder};
  std::vector<std::pair<fs::file_time_type, fs::path>> found;
  const auto options = fs::directory_options::skip_permission_denied;
  std::error_code error;
  fs::recursive_directory_iterator entries(folder, options, error);
  for (; !error && entries != fs::recursive_directory_iterator();
       entries.increment(error)) {
    std::error_code ignored;
    if (!entries->is_directory(ignored)) continue;
    const bool run = is_run(entries->path());
    if (run || entries.depth() + 1 >= kDepth)
      entries.disable_recursion_pending();
    if (!run) continue;
    auto newest = fs::file_time_type::min();
    for (const char* name : {"metrics.jsonl", "status", "config.toml"}) {
      const auto time = fs::last_write_time(entries->path() / name, ignored);
      if (!ignored) newest = std::max(newest, time);
    }
    found.emplace_back(newest, entries->path());
  }
  std::ranges::sort(found, std::greater());
  if (found.size() > kMostRuns) found.resize(kMostRuns);
  std::vector<fs::path> runs;
  for (auto& [time, path] : found) runs.push_back(std::move(path));
  return runs;
}

}  // namespace echelon::watch
