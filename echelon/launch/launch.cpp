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

// `about`: on several hosts it may be one copy off. The ranks print it exactly.
std::string from_step(int64_t step, bool about) {
  if (step <= 0) return ", from the start";
  return format(", from {}step {}", about ? "about " : "", step);
}

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
  for (const auto& [name, value] : options.environment) {
    if (name == "CUDA_VISIBLE_DEVICES") needs.visible_gpus = value;
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
int run_job(
    const LaunchOptions& options, Hosts hosts, const HealthBefore& at_start,
    monitoring::JobBoard& board, pid_t exporter, pid_t status_writer) {
  const auto last_step = [&]() -> std::optional<int64_t> {
    if (!options.last_step) return std::nullopt;
    return options.last_step();
  };
  LauncherState launcher{
      .board = board, .exporter = exporter, .status_writer = status_writer};
  try {
    const std::string socket = options.control ? options.control() : "";
    if (!socket.empty()) launcher.control.emplace(socket);
  } catch (const ConfigError& error) {
    std::cerr << "warning: `echelon job` cannot reach this job: "
              << error.what() << "\n";
  }
  // A host that waits for others, or as a spare, has loaded the program.
  if (!hosts.alone() && options.fork_ranks) {
    launcher.forks.warm(
        {.path = find_program(options.command[0]),
         .command = options.command,
         .environment = own_environment(),
         .signal_mask = launcher.signals.mask_before()});
  }
  Restarts restarts(options.max_restarts, options.least_nodes > 0);
  const auto may_restart = [&] {
    return restarts.left(FailureKind::program) ||
           restarts.left(FailureKind::outside);
  };
  LaunchOptions own = options;
  // Doubled by each hang, which may have been none.
  auto least_hang = kLeastHang;
  std::vector<std::string> failures;
  std::optional<BeforeResize> before;
  std::string layout;  // of a job on one host; empty: the command's
  Variables devices;   // of resizes
  const std::string name = random_job_id();
  const auto end = [&](int exit_code) {
    hosts.finish(exit_code);
    return exit_code;
  };
  for (int generation = 0;; ++generation) {
    std::optional<JobStart> start;
    if (hosts.alone()) {
      hosts = Hosts();
      start = start_alone(own);
      start->place.job = name;
      start->place.generation = generation;
      start->may_restart = may_restart();
      start->layout = layout;
    } else {
      start = hosts.next(may_restart(), launcher.signals);
      if (!start) return hosts.exit_code();
      if (options.on_met && (!launcher.helper || has_ended(*launcher.helper))) {
        launcher.helper =
            options.on_met(start->place.node_address, hosts.key_for("memory"));
      }
    }
    if (generation > 0 && !launcher.change_began) {
      launcher.change_began = std::chrono::steady_clock::now();
    }
    if (options.use_layout && !(hosts.alone() && layout.empty())) {
      options.use_layout(start->layout, hosts.coordinates());
    }
    start->place.max_restarts = options.max_restarts;
    std::optional<ProgressBoard> progress;
    std::optional<Watched> watched;
    own.environment = options.environment;
    own.environment.insert(
        own.environment.end(), devices.begin(), devices.end());
    if (options.max_restarts > 0) {
      progress.emplace(own.num_ranks);
      own.environment.emplace_back("ECHELON_PROGRESS", progress->path());
      watched.emplace(HangWatch(own.num_ranks, least_hang), *progress);
    }
    Job job(
        own, std::move(*start), hosts, launcher, restarts,
        watched ? &*watched : nullptr);
    Outcome outcome = job.run();
    if (job.hung()) least_hang *= 2;
    const auto step = last_step();
    if (outcome.cause) board.note_failure(line_of(*outcome.cause));
    if (!hosts.coordinates()) {
      // Another host decides. This one counts too: it may be the next to
      // decide.
      if (outcome.cause) {
        restarts.on_end(outcome, step);
        board.count_restart(reason_of(*outcome.cause, job.hung()));
      }
      continue;
    }
    const auto say_layout = [&] {
      job.say(format(
          "{}, {}{}", counted(own.num_ranks, "rank"), layout,
          step ? from_step(*step, !hosts.alone()) : ""));
    };
    if (const auto& resize = job.resize()) {
      before = {own.num_ranks, step, devices};
      own.num_ranks = resize->num_ranks;
      if (!resize->devices.empty()) devices = resize->devices;
      layout = resize->layout;
      outcome.stopped_by = 0;  // a rank that failed meanwhile starts again
      if (outcome.exit_code == static_cast<int>(ExitCode::preempted)) {
        board.count_restart(monitoring::RestartReason::resized);
        say_layout();
        continue;
      }
    }
    if (job.changes_hosts()) {
      outcome.stopped_by = 0;
      if (outcome.exit_code == static_cast<int>(ExitCode::preempted)) {
        if (hosts.leaves()) return outcome.exit_code;  // the others regroup
        board.count_restart(monitoring::RestartReason::hosts_changed);
        job.say(
            "hosts change" + (step ? from_step(*step, !hosts.alone()) : ""));
        continue;
      }
    }
    if (outcome.cause) failures.push_back(line_of(*outcome.cause));
    Restarts::Decision decision = restarts.on_end(outcome, step);
    if (outcome.cause && outcome.stopped_by == 0 && options.max_restarts > 0) {
      for (const auto& [text, final] : look_at_host(own, at_start)) {
        job.say("this host: " + text);
        const bool restarts_here =
            hosts.alone() && decision.verdict == Restarts::Verdict::restart;
        if (final && restarts_here) {
          decision = {.words = "no restart: on this host it cannot help"};
        }
      }
    }
    // So many ranks have done no step, and those before them could.
    if (before && outcome.cause &&
        decision.verdict != Restarts::Verdict::restart &&
        step == before->step) {
      own.num_ranks = before->num_ranks;
      devices = before->devices;
      before.reset();
      layout = options.resize(own.num_ranks);
      board.count_restart(monitoring::RestartReason::resized);
      say_layout();
      continue;
    }
    switch (decision.verdict) {
      case Restarts::Verdict::end:
        if (outcome.cause) list_failures(job, failures);
        if (!decision.words.empty()) job.say(decision.words);
        return end(outcome.exit_code);
      case Restarts::Verdict::stuck:
        list_failures(job, failures);
        job.say(format(
            "{} restarts in a row brought no new step, so another one would "
            "not help",
            Restarts::kMostWithoutProgress));
        return end(static_cast<int>(ExitCode::do_not_requeue));
      case Restarts::Verdict::restart:
        board.count_restart(reason_of(*outcome.cause, job.hung()));
        job.say(format(
            "restart {}{}{}", decision.words,
            step ? from_step(*step, !hosts.alone()) : "",
            decision.wait.count() > 0
                ? format(
                      ", in {} s, since the last one brought no new step",
                      decision.wait.count())
                : ""));
        hosts.say_busy(decision.wait + kBetween);
        wait_for(decision.wait, launcher.signals);
    }
  }
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
    const int exit_code = run_job(
        options, alone ? Hosts() : Hosts::meet(options), at_start, board,
        exporter ? exporter->pid() : -1, status.pid());
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
