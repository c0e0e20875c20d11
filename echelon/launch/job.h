// The ranks of one host while they run: a single thread waits for output, ends,
// signals and time, and carries out the orders of the Policy.
#pragma once

#include <poll.h>

#include <optional>
#include <string>
#include <vector>

#include "echelon/cluster/host.h"
#include "echelon/launch/cause.h"
#include "echelon/launch/control.h"
#include "echelon/launch/fork_server.h"
#include "echelon/launch/guard.h"
#include "echelon/launch/hang_watch.h"
#include "echelon/launch/hosts.h"
#include "echelon/launch/job_start.h"
#include "echelon/launch/options.h"
#include "echelon/launch/output.h"
#include "echelon/launch/policy.h"
#include "echelon/launch/restarts.h"
#include "echelon/launch/scratch.h"
#include "echelon/launch/signals.h"
#include "echelon/monitoring/job_board.h"

namespace echelon::launch {

/// How a job that may start again is watched.
struct Watched {
  HangWatch hangs;
  const ProgressBoard& progress;
};

/// What the launcher keeps from one generation of a job's ranks to the next.
struct LauncherState {
  SignalFile signals;  // those between two generations wait for the next
  ForkServer forks;
  std::optional<ControlSocket> control;
  std::optional<pid_t> helper;  // of LaunchOptions::on_met
  monitoring::JobBoard& board;
  // The processes of LaunchOptions::metrics; -1: none.
  pid_t exporter = -1;
  pid_t status_writer = -1;
  /// When the ranks were told to end for a change, or the new ones started
  /// after a failure; until one has done a step.
  std::optional<TimePoint> change_began;
};

/// The variables of this process, "NAME=value" each.
std::vector<std::string> own_environment();

class Job {
 public:
  /// `restarts`: when a rank fails and one of them is left, the others are
  /// killed at once. `watched`: a rank that hangs has failed; null: it is left
  /// to the ranks' own time limits.
  Job(const LaunchOptions& options, JobStart start, Hosts& hosts,
      LauncherState& launcher, const Restarts& restarts, Watched* watched);
  ~Job();
  /// Runs all ranks to their end, says why one failed, and returns how the job
  /// ended. Throws ConfigError when it could not start.
  Outcome run();
  /// How many ranks somebody asked for, and how they divide the work; none when
  /// nobody did, or when the job was told to stop after that.
  struct Resize {
    int num_ranks;
    std::string layout;
    /// What shows the ranks their devices; empty: these stay.
    Variables devices;
  };
  const std::optional<Resize>& resize() const { return resize_; }
  /// Whether the ranks were told to end so that hosts can come or leave.
  bool changes_hosts() const { return changes_hosts_; }
  /// Whether a rank was taken for one that makes no progress.
  bool hung() const { return hung_; }
  /// Writes a line of the launcher's own to stderr.
  void say(const std::string& text);

 private:
  struct Rank {
    Rank(RankOutput o) : output(std::move(o)) {}
    RankOutput output;
    Guard guard;
    std::string error_file;
    RankEnd end;
    std::string hang;  // why it was taken for one that hangs
    int pid = 0;
    bool ended = false;  // its main process has ended
    bool empty = false;  // none of its processes is left
  };

  void start_ranks();
  void start_rank(int local_rank, const std::string& program);
  Show show_of(int rank) const;
  int input_of(int rank) const;
  std::string log_path(int rank) const;
  bool all_empty() const;
  /// Whether SIGKILL has not helped.
  bool unkillable() const;

  void wait_for_events();
  int poll_timeout_ms() const;
  void take_report(Rank& rank);
  void take_end(Rank& rank, const GuardReport& report);
  std::string shortage_of_memory() const;
  void lose_guard(Rank& rank);
  void look_for_hangs();
  void end_hang();
  void take_hosts(const pollfd* files);
  void end_for_change();
  std::string drain();
  void fail_with_others();
  bool is_ending() const;
  void take_signal(int signal);
  std::string take_request(const std::string& request);
  std::string begin_resize(const std::string& request);
  void suspend();
  void obey(const Policy::Orders& orders);
  void send(int signal, bool ends = false);
  void follow_broken_screen();

  void drain_outputs();
  Outcome local_outcome();
  void report(const Outcome& outcome);

  const LaunchOptions& options_;
  JobStart start_;
  Hosts& hosts_;
  LauncherState& launcher_;
  const Restarts& restarts_;
  Watched* const watched_;
  TimePoint looked_{std::chrono::steady_clock::now()};
  bool knows_peak_ = false;
  const cluster::MemoryGroup memory_before_ = cluster::memory_group();
  ScratchFolder scratch_;
  Screen screen_;
  Policy policy_;
  std::vector<Rank> ranks_;
  std::string start_error_;  // the program could not be executed
  std::optional<Resize> resize_;
  bool changes_hosts_ = false;
  std::optional<HangWatch::Hang> stalled_;  // seen by the last look
  bool hung_ = false;
  bool answered_ = false;  // rank 0 ended with options_.answer_code
  std::optional<TimePoint> unkillable_at_;  // set by SIGKILL
  bool ended_ = false;                      // all ranks of this host have ended
  std::optional<TimePoint> others_deadline_;  // for the ends of other hosts
};

}  // namespace echelon::launch
