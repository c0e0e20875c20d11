// The launcher's event loop. One poll() waits for signals, output of the ranks,
// reports of their guards, messages of the other hosts, and the next deadline.
// In each turn output is read before the guards' reports, so that the last
// lines of a rank are there when its end is judged. The events go to Policy,
// whose orders (signals) go to the guards. When no process of the ranks is left
// here, or SIGKILL has not helped, this host says how its ranks ended; node 0
// puts the hosts' outcomes together and the loop ends with the job's.
#include "echelon/launch/job.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <sstream>
#include <utility>

#include "echelon/cluster/host.h"
#include "echelon/error.h"
#include "echelon/launch/checks.h"
#include "echelon/launch/health.h"
#include "echelon/launch/restarts.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

extern char** environ;

namespace echelon::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kSettle{1000};
constexpr milliseconds kIdleCheck{250};
// After SIGKILL only a process that hangs in the kernel remains.
constexpr milliseconds kUnkillable{10000};
constexpr milliseconds kLoading{60000};

bool asks_to_stop(int signal) {
  return signal == SIGINT || signal == SIGTERM || signal == SIGHUP ||
         signal == SIGQUIT;
}

// A rank needs four files; the usual soft limit of 1024 is too low for
// hundreds.
void allow_files(int num_ranks) {
  rlimit limit{};
  const rlim_t wanted = 64 + 8 * static_cast<rlim_t>(num_ranks);
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < wanted) {
    limit.rlim_cur = std::min(wanted, limit.rlim_max);
    setrlimit(RLIMIT_NOFILE, &limit);
  }
}

void make_log_folder(const std::string& folder) {
  if (folder.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    throw ConfigError(format(
        "[launch] cannot make the log folder {}: {}; choose another", folder,
        error.message()));
  }
}

// A guard closes its socket when it ends. It is a child of this process, or of
// the fork server.
void wait_for_end(const Guard& guard) {
  fcntl(guard.socket, F_SETFL, 0);
  GuardReport report;
  ssize_t got;
  do {
    got = recv(guard.socket, &report, sizeof report, 0);
  } while (got > 0 || (got < 0 && errno == EINTR));
}

// Kills what a killed guard leaves to this process. The guard's socket closes
// before its children change parents, so this looks until the guard is gone and
// nothing is left.
void end_orphans(pid_t guard, const std::vector<pid_t>& guards) {
  const auto deadline = steady_clock::now() + kSettle;
  for (;;) {
    const bool gone =
        waitpid(guard, nullptr, WNOHANG) == guard || kill(guard, 0) != 0;
    const auto orphans = descendants(getpid(), guards);
    for (const pid_t pid : orphans) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, WNOHANG);  // those that are children by now
    }
    if ((gone && orphans.empty()) || steady_clock::now() > deadline) return;
    usleep(1000);
  }
}

}  // namespace

std::vector<std::string> own_environment() {
  std::vector<std::string> result;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    result.emplace_back(*entry);
  }
  return result;
}

Job::Job(
    const LaunchOptions& options, JobStart start, Hosts& hosts,
    LauncherState& launcher, const Restarts& restarts, Watched* watched)
    : options_(options),
      start_(std::move(start)),
      hosts_(hosts),
      launcher_(launcher),
      restarts_(restarts),
      watched_(watched),
      screen_(STDOUT_FILENO, STDERR_FILENO),
      policy_(options.grace, std::min(kSettle, options.grace)) {}

// A guard whose rank hangs in the kernel does not end, so it is not waited for.
Job::~Job() {
  for (const Rank& rank : ranks_) {
    // The guard kills what is left.
    if (rank.guard.socket >= 0) shutdown(rank.guard.socket, SHUT_WR);
  }
  for (const Rank& rank : ranks_) {
    if (rank.guard.pid <= 0) continue;
    const bool ends = rank.empty || !unkillable();
    if (ends) wait_for_end(rank.guard);
    close(rank.guard.socket);
    while (waitpid(rank.guard.pid, nullptr, ends ? 0 : WNOHANG) < 0 &&
           errno == EINTR) {
    }
  }
}

Outcome Job::run() {
  start_ranks();
  while (!hosts_.end()) {
    wait_for_events();
    const auto now = steady_clock::now();
    if (!ended_ && (all_empty() || unkillable())) {
      ended_ = true;
      drain_outputs();
      const Outcome outcome = local_outcome();
      if (outcome.exit_code != 0) {
        others_deadline_ = now + options_.grace + kUnkillable;
      }
      hosts_.say_outcome(outcome);
    }
    if (others_deadline_ && now > *others_deadline_) hosts_.give_up();
  }
  // The job may be over on other hosts before it is on this one.
  while (!all_empty() && !unkillable()) {
    fail_with_others();
    wait_for_events();
  }
  if (!ended_) drain_outputs();
  report(*hosts_.end());
  screen_.drain(milliseconds(2000));
  return *hosts_.end();
}

void Job::start_ranks() {
  const std::string program = find_program(options_.command[0]);
  make_log_folder(options_.log_dir);
  allow_files(options_.num_ranks);
  // When a guard is killed, its descendants come to this process, not to init.
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  launcher_.board.begin(
      {.number = start_.place.generation,
       .first_rank = start_.first_rank,
       .num_ranks = options_.num_ranks,
       .world_size = start_.world_size,
       .num_hosts = start_.num_nodes,
       .coordinates = hosts_.coordinates(),
       .visible_gpus = visible_gpus(options_.environment)});
  // The first rank may load its program for long.
  hosts_.say_busy(kLoading);
  ranks_.reserve(options_.num_ranks);
  for (int i = 0; i < options_.num_ranks; ++i) start_rank(i, program);
  hosts_.say_busy(milliseconds(0));
  start_.master.close();
}

void Job::start_rank(int local_rank, const std::string& program) {
  const int number = start_.first_rank + local_rank;
  const std::string error_file =
      format("{}/rank-{}.json", scratch_.path(), number);
  const bool append = start_.place.generation > 0;
  Rank rank(RankOutput(show_of(number), log_path(number), append, error_file));
  for (int stream = 1; stream <= 2; ++stream) {
    rank.output.set_prefix(
        stream,
        rank_prefix(number, start_.world_size, screen_.colours(stream)));
  }
  rank.end.rank = number;
  rank.error_file = error_file;

  const RankPlace place{
      .rank = number,
      .local_rank = local_rank,
      .world_size = start_.world_size,
      .local_world_size = options_.num_ranks,
      .node_rank = start_.node_rank,
      .num_nodes = start_.num_nodes};
  const int master_fd = number == 0 ? start_.master.fd() : -1;
  const GuardSpec spec{
      .path = program,
      .command = options_.command,
      .environment = rank_environment(
          own_environment(), place, start_.place, {rank.error_file, master_fd},
          options_.environment, cluster::available_cores()),
      .input = input_of(number),
      .output = rank.output.write_end(1),
      .error = rank.output.write_end(2),
      .master_fd = master_fd,
      .error_file = rank.error_file,
      .scratch_dir = scratch_.path(),
      .signal_mask = launcher_.signals.mask_before()};
  std::optional<Guard> guard;
  if (options_.fork_ranks)
    guard = launcher_.forks.start_guard(spec, launcher_.signals.fd());
  rank.guard = guard ? *guard : start_guard(spec);
  rank.output.close_write_ends();
  ranks_.push_back(std::move(rank));
}

Show Job::show_of(int rank) const {
  switch (options_.terminal) {
    case Terminal::prefixed:
      return Show::prefixed;
    case Terminal::plain:
      return start_.world_size == 1 ? Show::raw : Show::plain;
    case Terminal::rank_zero:
      return rank == 0 ? Show::direct : Show::hidden;
    case Terminal::hidden:
      return Show::hidden;
  }
  return Show::prefixed;
}

// Rank 0 alone reads the launcher's stdin, unless that is a terminal: reading a
// terminal from the background would stop the rank.
int Job::input_of(int rank) const {
  return rank == 0 && isatty(STDIN_FILENO) == 0 ? STDIN_FILENO : -1;
}

std::string Job::log_path(int rank) const {
  return options_.log_dir.empty()
             ? ""
             : format("{}/rank-{}.log", options_.log_dir, rank);
}

bool Job::unkillable() const {
  return unkillable_at_ && steady_clock::now() > *unkillable_at_;
}

bool Job::all_empty() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) {
    return rank.empty;
  });
}

int Job::poll_timeout_ms() const {
  auto next = steady_clock::now() + std::chrono::hours(1);
  for (const auto& deadline :
       {policy_.deadline(), unkillable_at_, others_deadline_,
        hosts_.deadline()}) {
    if (deadline) next = std::min(next, *deadline);
  }
  if (watched_ != nullptr) next = std::min(next, looked_ + HangWatch::kLook);
  if (std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) {
        return rank.output.waiting();
      })) {
    next = std::min(next, steady_clock::now() + kIdleCheck);
  }
  const auto left = std::chrono::ceil<milliseconds>(next - steady_clock::now());
  return static_cast<int>(std::max<int64_t>(0, left.count()));
}

void Job::wait_for_events() {
  std::vector<pollfd> files = {
      {launcher_.signals.fd(), POLLIN, 0},
      {screen_.pending_file(), POLLOUT, 0}};
  for (const Rank& rank : ranks_) {
    files.push_back({rank.guard.socket, POLLIN, 0});
    for (int stream = 1; stream <= 2; ++stream) {
      files.push_back(
          {screen_.full() ? -1 : rank.output.read_end(stream), POLLIN, 0});
    }
  }
  const size_t first_host = files.size();
  hosts_.add_files(files);
  const size_t control = files.size();
  if (launcher_.control) files.push_back({launcher_.control->fd(), POLLIN, 0});
  if (poll(files.data(), files.size(), poll_timeout_ms()) < 0 &&
      errno != EINTR) {
    throw Error(std::string("[launch] poll: ") + std::strerror(errno));
  }
  const auto now = steady_clock::now();
  for (size_t i = 0; i < ranks_.size(); ++i) {
    for (int stream = 1; stream <= 2; ++stream) {
      if (files[2 + 3 * i + stream].revents != 0) {
        ranks_[i].output.read(stream, now, screen_);
      }
    }
    ranks_[i].output.idle(now, screen_);
  }
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (files[2 + 3 * i].revents != 0) take_report(ranks_[i]);
  }
  take_hosts(files.data() + first_host);
  if (control < files.size() && files[control].revents != 0) {
    launcher_.control->serve(
        [&](const auto& text) { return take_request(text); });
  }
  while (const int signal = launcher_.signals.next()) take_signal(signal);
  look_for_hangs();
  obey(policy_.on_time(steady_clock::now()));
  screen_.pump();
  follow_broken_screen();
}

void Job::take_report(Rank& rank) {
  GuardReport report;
  const ssize_t size =
      recv(rank.guard.socket, &report, sizeof report, MSG_DONTWAIT);
  // A guard that exits before it reads an order resets the connection; its last
  // reports still come.
  if (size < 0 && (errno == EAGAIN || errno == EINTR || errno == ECONNRESET)) {
    return;
  }
  if (size != sizeof report) {
    lose_guard(rank);
    return;
  }
  rank.pid = report.pid;
  const std::string name = format("rank {}", rank.end.rank);
  const auto number = static_cast<int>(&rank - ranks_.data());
  switch (report.kind) {
    case GuardReport::started:
      launcher_.board.rank_started(number, report.pid);
      break;
    case GuardReport::fork_failed:
      start_error_ = format(
          "[launch] no process for {}: {}; `ulimit -u` and the container's "
          "pids "
          "limit set how many there may be (two a rank)",
          name, std::strerror(report.value));
      break;
    case GuardReport::exec_failed:
      start_error_ = explain_exec_error(options_.command[0], report.value);
      break;
    case GuardReport::stopped:
      if (report.value != SIGTSTP) {
        say(format(
            "{} was stopped by {}; `kill -CONT {}` continues it{}", name,
            signal_name(report.value), report.pid,
            watched_ != nullptr
                ? format(
                      ", and after {:g} s without it the rank has failed",
                      std::chrono::duration<double>(HangWatch::kStopped)
                          .count())
                : ""));
        if (watched_ != nullptr) {
          watched_->hangs.on_stopped(number, signal_name(report.value));
        }
      }
      break;
    case GuardReport::continued:
      if (watched_ != nullptr) watched_->hangs.on_continued(number);
      break;
    case GuardReport::exited:
      take_end(rank, report);
      break;
    case GuardReport::empty:
      rank.empty = true;
      break;
  }
  if (report.kind == GuardReport::fork_failed ||
      report.kind == GuardReport::exec_failed) {
    rank.ended = rank.empty = true;
    send(SIGKILL, /*ends=*/true);
  }
}

void Job::take_end(Rank& rank, const GuardReport& report) {
  rank.ended = true;
  rank.end.status = report.value;
  rank.end.time_ns = report.time_ns;
  rank.end.told_to_end = rank.hang.empty() && report.ordered;
  rank.end.report = read_error_report(rank.error_file);
  if (!rank.hang.empty()) {
    rank.end.report = ErrorReport{
        .message = rank.hang, .time_ns = report.time_ns, .rank = rank.end.rank};
  }
  if (rank.end.rank == 0 && options_.answer_code != 0 && !rank.end.report &&
      WIFEXITED(report.value) &&
      WEXITSTATUS(report.value) == options_.answer_code) {
    answered_ = true;
    rank.end.status = 0;
  }
  if (WIFSIGNALED(report.value) && WTERMSIG(report.value) == SIGKILL &&
      !rank.end.told_to_end) {
    rank.end.killed_because = shortage_of_memory();
  }
  const auto now = steady_clock::now();
  for (int stream = 1; stream <= 2; ++stream) {
    // A dead rank leaves little in its pipes; a child of it may write on.
    for (int i = 0; i < 4 && rank.output.read(stream, now, screen_); ++i) {
    }
  }
  rank.end.stderr_tail = rank.output.stderr_tail();
  launcher_.board.rank_ended(static_cast<int>(&rank - ranks_.data()));
  const bool failed = rank.end.status != 0;
  if (failed) launcher_.board.stop_training();
  const auto cause = failed ? find_cause({rank.end}) : std::nullopt;
  obey(policy_.on_rank_end(
      failed, cause && cause->consequence, now,
      start_.may_restart && cause && restarts_.left(cause->kind) &&
          Restarts::helps(exit_code_of(rank.end.status))));
}

void Job::look_for_hangs() {
  const auto now = steady_clock::now();
  const auto passed = std::chrono::floor<milliseconds>(now - looked_);
  if (watched_ == nullptr || passed < HangWatch::kLook) return;
  looked_ = now;
  const auto ranks = watched_->progress.read();
  launcher_.board.set_progress(ranks);
  if (!knows_peak_ && options_.peak_seconds) {
    const auto seconds = options_.peak_seconds(start_.world_size);
    knows_peak_ = seconds.has_value();
    launcher_.board.set_peak_seconds(seconds.value_or(0));
  }
  if (policy_.stopping() || policy_.stopped_by() != 0) return;
  stalled_.reset();
  if (launcher_.change_began &&
      std::ranges::any_of(
          ranks, [](const auto& rank) { return rank.count > 0; })) {
    hosts_.note_change(now - *std::exchange(launcher_.change_began, {}));
  }
  // Ranks that wait for another host's hang as little, and so do those whose
  // output nobody reads.
  if (!hosts_.doubtful() && !screen_.full()) {
    stalled_ = watched_->hangs.look(ranks, passed);
  }
  if (stalled_ && (stalled_->collectives < 0 || hosts_.alone())) {
    end_hang();
  } else {
    hosts_.set_stalled(stalled_ ? stalled_->collectives : -1);
  }
}

void Job::end_hang() {
  Rank& rank = ranks_[static_cast<size_t>(stalled_->rank)];
  if (rank.ended) return;
  hung_ = stalled_->collectives >= 0;
  launcher_.board.stop_training();
  rank.hang = stalled_->text;
  obey(policy_.on_rank_end(
      /*failed=*/true, /*consequence=*/false, steady_clock::now(),
      /*at_once=*/true));
}

void Job::lose_guard(Rank& rank) {
  close(std::exchange(rank.guard.socket, -1));
  if (!rank.empty) {
    // The guard itself was killed. Its rank dies with it, and this process must
    // end the rank's descendants.
    std::vector<pid_t> guards;
    for (const Rank& other : ranks_) {
      if (other.guard.socket >= 0) guards.push_back(other.guard.pid);
    }
    if (launcher_.forks.pid() > 0) guards.push_back(launcher_.forks.pid());
    if (launcher_.helper) guards.push_back(*launcher_.helper);
    for (const pid_t own : {launcher_.exporter, launcher_.status_writer}) {
      if (own > 0) guards.push_back(own);
    }
    end_orphans(rank.guard.pid, guards);
    rank.empty = true;
    if (!rank.ended) {
      take_end(
          rank, {GuardReport::exited, SIGKILL, rank.pid, steady_now_ns(),
                 is_ending()});
    }
  }
  while (waitpid(rank.guard.pid, nullptr, 0) < 0 && errno == EINTR) {
  }
  rank.guard.pid = -1;
}

void Job::take_hosts(const pollfd* files) {
  for (const HostEvent& event : hosts_.serve(files)) {
    switch (event.kind) {
      case HostEvent::failed:
        fail_with_others();
        break;
      case HostEvent::stopped:
        obey(policy_.on_remote_stop(event.number));
        break;
      case HostEvent::signal:
        send(event.number);
        break;
      case HostEvent::changes:
        if (!is_ending()) end_for_change();
        break;
      case HostEvent::hangs:
        if (stalled_ && !is_ending()) end_hang();
        break;
    }
  }
  if (!is_ending() && hosts_.wants_change()) {
    hosts_.say_changes();
    end_for_change();
  }
}

void Job::fail_with_others() {
  launcher_.board.stop_training();
  obey(policy_.on_remote_failure(steady_clock::now(), start_.may_restart));
}

bool Job::is_ending() const {
  return ended_ || policy_.stopping() || policy_.stopped_by() != 0;
}

// The ranks end as after SIGTERM, so that they save.
void Job::end_for_change() {
  changes_hosts_ = true;
  launcher_.change_began = steady_clock::now();
  launcher_.board.stop_training();
  obey(policy_.on_remote_stop(SIGTERM));
}

void Job::take_signal(int signal) {
  if (signal == SIGTSTP) {
    suspend();
  } else if (asks_to_stop(signal)) {
    if (ended_ && policy_.stopped_by() != 0) {
      hosts_.give_up();  // only the other hosts are still waited for
    }
    resize_.reset();
    changes_hosts_ = false;
    hosts_.say_stopped(signal);
    obey(policy_.on_stop_signal(signal, steady_clock::now()));
  } else {
    send(signal);
  }
}

// The first word of an answer says whether the request is carried out.
std::string Job::take_request(const std::string& request) {
  if (request == "status") {
    return format(
        "ranks {} generation {} hosts {}", start_.world_size,
        start_.place.generation, start_.num_nodes);
  }
  if (is_ending()) {
    return "refused: the ranks are ending; ask again when they have started";
  }
  if (request == "checkpoint") {
    send(SIGUSR1);
    hosts_.say_signal(SIGUSR1);
    return "done: each rank saves after its step";
  }
  if (request == "drain") return drain();
  if (request == "stop") {
    hosts_.say_stopped(SIGTERM);
    obey(policy_.on_stop_signal(SIGTERM, steady_clock::now()));
    return "done: the state is saved, and the job ends with code 75";
  }
  if (request.starts_with("resize ")) return begin_resize(request.substr(7));
  return format("refused: unknown request \"{}\"", request);
}

std::string Job::drain() {
  if (hosts_.alone()) {
    return "refused: it has no other host; `stop` saves and ends it";
  }
  const std::string reason = hosts_.leave();
  if (!reason.empty()) return "refused: " + reason;
  return "done: the state is saved, and the other hosts go on";
}

// "4", or "4 CUDA_VISIBLE_DEVICES=GPU-…,GPU-… …" with variables of the ranks,
// from who gives devices away. The ranks end as after SIGTERM, so that they
// save. The next generation has the other number.
std::string Job::begin_resize(const std::string& request) {
  std::istringstream words(request);
  std::string number;
  words >> number;
  if (!hosts_.alone()) {
    return "refused: it is on several hosts; start the command on one more, or "
           "drain one";
  }
  if (!options_.resize) return "refused: its number of ranks cannot change";
  const int num_ranks = std::atoi(number.c_str());
  if (num_ranks == start_.world_size) {
    return format("refused: it has {} ranks", number);
  }
  try {
    resize_ = Resize{num_ranks, options_.resize(num_ranks), {}};
  } catch (const Error& error) {
    return format("refused: {}", error.what());
  }
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos) continue;
    resize_->devices.emplace_back(
        word.substr(0, equals), word.substr(equals + 1));
  }
  launcher_.board.stop_training();
  obey(policy_.on_remote_stop(SIGTERM));
  return format(
      "done: from {} to {} ranks, {}", start_.world_size, num_ranks,
      resize_->layout);
}

// Ctrl-Z stops the ranks, then this process; `fg` continues all.
void Job::suspend() {
  send(SIGTSTP);
  screen_.pump();
  kill(getpid(), SIGSTOP);
  send(SIGCONT);
}

void Job::obey(const Policy::Orders& orders) {
  for (const int signal : orders) {
    if (signal == SIGKILL && !unkillable_at_) {
      unkillable_at_ = steady_clock::now() + kUnkillable;
    }
    send(signal, /*ends=*/true);
  }
  if (policy_.stopping()) hosts_.say_failed();
}

void Job::send(int signal, bool ends) {
  for (const Rank& rank : ranks_) {
    if (!rank.empty && rank.guard.socket >= 0) {
      const GuardOrder order{signal, ends};
      (void)!::send(rank.guard.socket, &order, sizeof order, MSG_NOSIGNAL);
    }
  }
}

// When the launcher's reader is gone (`| head`), a rank finds its own pipe
// closed, as it would without a launcher; with a log it writes on.
void Job::follow_broken_screen() {
  for (int stream = 1; stream <= 2; ++stream) {
    if (screen_.broken(stream) && options_.log_dir.empty() &&
        options_.terminal != Terminal::rank_zero) {
      for (Rank& rank : ranks_) rank.output.close_stream(stream);
    }
  }
}

void Job::drain_outputs() {
  const auto now = steady_clock::now();
  for (Rank& rank : ranks_) {
    for (int stream = 1; stream <= 2; ++stream) {
      for (int i = 0; i < 64 && rank.output.read(stream, now, screen_); ++i) {
        screen_.drain(milliseconds(2000));
      }
    }
    rank.output.finish(screen_);
    if (rank.output.log_error() != 0) {
      say(format(
          "the log {} ends early: {}", log_path(rank.end.rank),
          std::strerror(rank.output.log_error())));
    }
    if (!rank.empty) {
      say(format(
          "rank {} (pid {}) does not die of SIGKILL: it hangs in the kernel",
          rank.end.rank, rank.pid));
    }
  }
}

void Job::say(const std::string& text) {
  // A progress line of rank 0, or the terminal's ^C, may be on this line.
  const bool clear =
      screen_.is_terminal(2) &&
      (options_.terminal == Terminal::rank_zero || policy_.stopped_by() != 0);
  screen_.write(2, (clear ? "\r\x1b[K" : "") + ("echelon: " + text + "\n"));
  screen_.pump();
}

}  // namespace echelon::launch
