#include "echelon/launch/launch.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "echelon/error.h"
#include "echelon/launch/checks.h"
#include "echelon/launch/fork_server.h"
#include "echelon/launch/health.h"
#include "echelon/launch/hosts.h"
#include "echelon/launch/job.h"
#include "echelon/launch/job_start.h"
#include "echelon/launch/restarts.h"
#include "echelon/launch/signals.h"
#include "echelon/monitoring/exporter.h"
#include "echelon/monitoring/status_writer.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::launch {
namespace {

// If 0, 1 or 2 were closed, the launcher's own pipes would get these numbers.
void open_standard_files() {
  int fd = -1;
  do {
    fd = open("/dev/null", O_RDWR);
  } while (fd >= 0 && fd <= 2);
  if (fd > 2) close(fd);
}

constexpr std::chrono::milliseconds kLeastHang{3000};
// From the end of a wait to the next word to the other hosts.
constexpr std::chrono::seconds kBetween{5};

std::string line_of(const Cause& cause) {
  const std::string line = cause.text.substr(0, cause.text.find('\n'));
  return cause.rank < 0 ? line : format("rank {}: {}", cause.rank, line);
}

// All that went wrong, once no restart is left.
void list_failures(Job& job, const std::vector<std::string>& failures) {
  if (failures.size() < 2) return;
  std::string text = format("{} failures:", failures.size());
  for (size_t i = 0; i < failures.size(); ++i) {
    text += format("\n  {}. {}", i + 1, failures[i]);
  }
  job.say(text);
}

std::vector<HealthFinding>
look_at_host(const LaunchOptions& options, const HealthBefore& before) {
  HostNeeds needs = options.host;
  if (needs.folder.empty()) needs.folder = options.log_dir;
  if (const auto own = visible_gpus(options.environment)) {
    needs.visible_gpus = own;
  }
  return look_at_host(needs, before);
}

// Ends at once when a signal comes, which is left for the next generation.
void wait_for(std::chrono::milliseconds time, const SignalFile& signals) {
  pollfd file{signals.fd(), POLLIN, 0};
  if (time.count() > 0) poll(&file, 1, static_cast<int>(time.count()));
}

// Leaves the process for its parent's own wait.
bool has_ended(pid_t child) {
  siginfo_t info{};
  return child > 0 &&
         waitid(
             P_PID, static_cast<id_t>(child), &info,
             WEXITED | WNOHANG | WNOWAIT) == 0 &&
         info.si_pid == child;
}

monitoring::RestartReason reason_of(const Cause& cause, bool hung) {
  using monitoring::RestartReason;
  if (hung) return RestartReason::rank_hung;
  switch (cause.kind) {
    case FailureKind::program:
      return RestartReason::rank_failed;
    case FailureKind::memory:
      return RestartReason::out_of_memory;
    case FailureKind::outside:
      return cause.rank < 0 ? RestartReason::host_lost
                            : RestartReason::rank_killed;
  }
  return RestartReason::rank_failed;
}

// A job before its number of ranks changed.
struct BeforeResize {
  int num_ranks;
  std::optional<int64_t> step;
  Variables devices;
};

// Runs generation after generation until one ends the job.
class Generations {
 public:
  Generations(
      const LaunchOptions& options, Hosts hosts, const HealthBefore& at_start,
      monitoring::JobBoard& board, pid_t exporter, pid_t status_writer);
  /// Returns the job's exit code.
  int run();

 private:
  std::optional<JobStart> next_start(int number);
  std::optional<int> after(Job& job, Outcome outcome);
  bool resize(Job& job, Outcome& outcome);
  void look_for_reasons(Job& job, Restarts::Decision& decision);
  bool undo_resize(Job& job);
  int end(int exit_code);
  void say_layout(Job& job);
  std::string from_step() const;

  const LaunchOptions& options_;
  Hosts hosts_;
  const HealthBefore& at_start_;
  LauncherState launcher_;
  Restarts restarts_;
  const std::string name_ = random_job_id();
  LaunchOptions own_;  // of the generation
  // The last step that the next generation would not repeat; none: not known.
  std::optional<int64_t> step_;
  // Doubled by each hang, which may have been none.
  std::chrono::milliseconds least_hang_ = kLeastHang;
  std::vector<std::string> failures_;
  std::optional<BeforeResize> before_;
  std::string layout_;  // of a job on one host; empty: the command's
  Variables devices_;   // of resizes
};

Generations::Generations(
    const LaunchOptions& options, Hosts hosts, const HealthBefore& at_start,
    monitoring::JobBoard& board, pid_t exporter, pid_t status_writer)
    : options_(options),
      hosts_(std::move(hosts)),
      at_start_(at_start),
      launcher_{
          .board = board, .exporter = exporter, .status_writer = status_writer},
      restarts_(options.max_restarts, options.least_nodes > 0),
      own_(options) {
  try {
    const std::string socket = options.control ? options.control() : "";
    if (!socket.empty()) launcher_.control.emplace(socket);
  } catch (const ConfigError& error) {
    std::cerr << "warning: `echelon job` cannot reach this job: "
              << error.what() << "\n";
  }
  // A host that waits for others, or as a spare, has loaded the program.
  if (!hosts_.alone() && options.fork_ranks) {
    launcher_.forks.warm(
        {.path = find_program(options.command[0]),
         .command = options.command,
         .environment = own_environment(),
         .signal_mask = launcher_.signals.mask_before()});
  }
}

int Generations::run() {
  for (int number = 0;; ++number) {
    auto start = next_start(number);
    if (!start) return hosts_.exit_code();
    std::optional<ProgressBoard> progress;
    std::optional<Watched> watched;
    own_.environment = options_.environment;
    own_.environment.insert(
        own_.environment.end(), devices_.begin(), devices_.end());
    if (options_.max_restarts > 0) {
      progress.emplace(own_.num_ranks);
      own_.environment.emplace_back("ECHELON_PROGRESS", progress->path());
      watched.emplace(HangWatch(own_.num_ranks, least_hang_), *progress);
    }
    Job job(
        own_, std::move(*start), hosts_, launcher_, restarts_,
        watched ? &*watched : nullptr);
    Outcome outcome = job.run();
    if (const auto exit_code = after(job, std::move(outcome))) {
      return *exit_code;
    }
  }
}

// Nothing when the job is over on this host.
std::optional<JobStart> Generations::next_start(int number) {
  const bool may_restart = restarts_.left(FailureKind::program) ||
                           restarts_.left(FailureKind::outside);
  std::optional<JobStart> start;
  if (hosts_.alone()) {
    hosts_ = Hosts();
    start = start_alone(own_);
    start->place.job = name_;
    start->place.generation = number;
    start->may_restart = may_restart;
    start->layout = layout_;
  } else {
    start = hosts_.next(may_restart, launcher_.signals);
    if (!start) return start;
    if (options_.on_met &&
        (!launcher_.helper || has_ended(*launcher_.helper))) {
      launcher_.helper =
          options_.on_met(start->place.node_address, hosts_.key_for("memory"));
    }
  }
  if (number > 0 && !launcher_.change_began) {
    launcher_.change_began = std::chrono::steady_clock::now();
  }
  if (options_.use_layout && !(hosts_.alone() && layout_.empty())) {
    options_.use_layout(start->layout, hosts_.coordinates());
  }
  start->place.max_restarts = options_.max_restarts;
  return start;
}

// The job's exit code; none when another generation follows.
std::optional<int> Generations::after(Job& job, Outcome outcome) {
  if (job.hung()) least_hang_ *= 2;
  if (options_.last_step) step_ = options_.last_step();
  const auto& cause = outcome.cause;
  if (cause) launcher_.board.note_failure(line_of(*cause));
  if (!hosts_.coordinates()) {
    // Another host decides. This one counts too: it may be the next to decide.
    if (cause) {
      restarts_.on_end(outcome, step_);
      launcher_.board.count_restart(reason_of(*cause, job.hung()));
    }
    return std::nullopt;
  }
  if (job.resize() && resize(job, outcome)) return std::nullopt;
  if (job.changes_hosts()) {
    outcome.stopped_by = 0;
    if (outcome.exit_code == static_cast<int>(ExitCode::preempted)) {
      if (hosts_.leaves()) return outcome.exit_code;  // the others regroup
      launcher_.board.count_restart(monitoring::RestartReason::hosts_changed);
      job.say("hosts change" + from_step());
      return std::nullopt;
    }
  }
  if (cause) failures_.push_back(line_of(*cause));
  Restarts::Decision decision = restarts_.on_end(outcome, step_);
  if (cause && outcome.stopped_by == 0 && options_.max_restarts > 0) {
    look_for_reasons(job, decision);
  }
  if (cause && decision.verdict != Restarts::Verdict::restart &&
      undo_resize(job)) {
    return std::nullopt;
  }
  switch (decision.verdict) {
    case Restarts::Verdict::end:
      if (cause) list_failures(job, failures_);
      if (!decision.words.empty()) job.say(decision.words);
      return end(outcome.exit_code);
    case Restarts::Verdict::stuck:
      list_failures(job, failures_);
      job.say(format(
          "{} restarts in a row brought no new step, so another one would not "
          "help",
          Restarts::kMostWithoutProgress));
      return end(static_cast<int>(ExitCode::do_not_requeue));
    case Restarts::Verdict::restart:
      break;
  }
  launcher_.board.count_restart(reason_of(*cause, job.hung()));
  job.say(format(
      "restart {}{}{}", decision.words, from_step(),
      decision.wait.count() > 0
          ? format(
                ", in {} s, since the last one brought no new step",
                decision.wait.count())
          : ""));
  hosts_.say_busy(decision.wait + kBetween);
  wait_for(decision.wait, launcher_.signals);
  return std::nullopt;
}

// Somebody asked for other ranks. Whether they start at once: those before them
// have saved.
bool Generations::resize(Job& job, Outcome& outcome) {
  before_ = {own_.num_ranks, step_, devices_};
  own_.num_ranks = job.resize()->num_ranks;
  if (!job.resize()->devices.empty()) devices_ = job.resize()->devices;
  layout_ = job.resize()->layout;
  outcome.stopped_by = 0;  // a rank that failed meanwhile starts again
  if (outcome.exit_code != static_cast<int>(ExitCode::preempted)) return false;
  say_layout(job);
  return true;
}

// Says what is wrong with this host, where it may be why the ranks failed.
void Generations::look_for_reasons(Job& job, Restarts::Decision& decision) {
  for (const auto& [text, final] : look_at_host(own_, at_start_)) {
    job.say("this host: " + text);
    if (final && hosts_.alone() &&
        decision.verdict == Restarts::Verdict::restart) {
      decision = {.words = "no restart: on this host it cannot help"};
    }
  }
}

// Whether the job goes on with the ranks before a resize: those after it have
// done no step.
bool Generations::undo_resize(Job& job) {
  if (!before_ || step_ != before_->step) return false;
  own_.num_ranks = before_->num_ranks;
  devices_ = before_->devices;
  before_.reset();
  layout_ = options_.resize(own_.num_ranks);
  say_layout(job);
  return true;
}

int Generations::end(int exit_code) {
  hosts_.finish(exit_code);
  return exit_code;
}

void Generations::say_layout(Job& job) {
  launcher_.board.count_restart(monitoring::RestartReason::resized);
  job.say(format(
      "{}, {}{}", counted(own_.num_ranks, "rank"), layout_, from_step()));
}

// On several hosts it may be one copy off. The ranks print it exactly.
std::string Generations::from_step() const {
  if (!step_) return "";
  if (*step_ <= 0) return ", from the start";
  return format(", from {}step {}", hosts_.alone() ? "" : "about ", *step_);
}

}  // namespace

int run(const LaunchOptions& options) {
  check(options);
  open_standard_files();
  find_program(options.command[0]);
  const auto at_start = HealthBefore::now();
  for (const auto& finding : look_at_host(options, at_start)) {
    std::cerr << "echelon: this host: " << finding.text << "\n";
  }
  monitoring::JobBoard board(kMaxRanksPerHost);
  std::optional<monitoring::Exporter> exporter;
  if (!options.metrics.address.empty()) {
    exporter.emplace(options.metrics, board);
    std::cerr << format(
        "echelon: the job's figures are at {}{}\n", exporter->url(),
        exporter->is_loopback() ? ""
                                : ", for everyone who reaches that address");
  }
  const monitoring::StatusWriter status(options.metrics, board);
  const bool alone = options.num_nodes == 1 && !options.joins;
  try {
    Generations generations(
        options, alone ? Hosts() : Hosts::meet(options), at_start, board,
        exporter ? exporter->pid() : -1, status.pid());
    const int exit_code = generations.run();
    board.end(exit_code);
    return exit_code;
  } catch (const Error& error) {
    const std::string text = error.what();
    board.note_failure(text.substr(0, text.find('\n')));
    board.end(static_cast<int>(error.exit_code()));
    throw;
  }
}

}  // namespace echelon::launch
