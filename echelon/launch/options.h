// The options of a launch: the program, the number of ranks and hosts, and
// where the ranks' output is shown.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "echelon/authentication/key.h"
#include "echelon/environment/rank_environment.h"
#include "echelon/monitoring/exporter.h"

namespace echelon::launch {

/// The form of the ranks' output on the launcher's own stdout and stderr.
enum class Terminal {
  prefixed,   // every line of every rank, with "[3] " in front
  plain,      // every line of every rank, unchanged
  rank_zero,  // rank 0 alone: its stdout is the launcher's own, so it can draw
              // a progress line; its stderr is shown unchanged
  hidden,     // nothing of any rank: the logs have it
};

/// What a job needs of this host. Empty and 0: not known.
struct HostNeeds {
  std::string folder;       // where its ranks write; empty: log_dir
  double memory_bytes = 0;  // of all ranks of the host
  double disk_bytes = 0;    // for one checkpoint
  bool gpus = true;         // its ranks may use some
  /// Their CUDA_VISIBLE_DEVICES; none: the launcher's own.
  std::optional<std::string> visible_gpus;
};

struct LaunchOptions {
  /// The program (looked up in PATH) and its arguments.
  std::vector<std::string> command;
  int num_ranks = 1;  // on this host

  // Several hosts: every host starts the launcher with the same num_nodes,
  // master_addr and master_port, and a node_rank of its own.
  int num_nodes = 1;
  int node_rank = 0;
  std::string master_addr;  // of node 0; one host always uses 127.0.0.1
  int master_port = 0;      // 0: on one host any free one, else 29500
  /// A master_addr that does not exist is waited for, as the name of a pod that
  /// has just begun. Otherwise it is an error.
  bool name_may_come = false;
  /// The job goes on with fewer hosts, down to so many, and takes hosts that
  /// come, up to num_nodes. 0: it needs all.
  int least_nodes = 0;
  /// This host comes to a job that runs: master_addr and master_port are where
  /// any launcher of it listens, and node_rank is not used.
  bool joins = false;
  /// What all hosts must have in common: the configuration and the version of
  /// the program.
  std::string identity;
  std::chrono::milliseconds join_timeout = std::chrono::minutes(5);
  std::string token_file;  // what all hosts know (authentication/token.h)
  /// What launchers tell each other, and the ranks' store, is encrypted
  /// (authentication/channel.h). All hosts must say the same.
  bool tls = false;

  /// The folder of rank-N.log, one per rank of this host, with everything that
  /// the rank wrote to stdout and stderr; it is made. Empty: no logs.
  std::string log_dir;
  Terminal terminal = Terminal::prefixed;

  /// How long ranks may take to end after SIGTERM, before SIGKILL.
  std::chrono::milliseconds grace = std::chrono::seconds(5);

  /// Added to every rank's environment; wins over the launcher's variables.
  Variables environment;

  /// True when the program is known to take ECHELON_MASTER_FD (see
  /// rank_environment.h): then the socket listens before any rank starts, and
  /// no rank's first connection is refused. False leaves it bound but not
  /// listening, so that any other program can open MASTER_PORT itself.
  bool listen_early = false;

  /// True when the program calls serve_forks(): ranks are forked from one
  /// process that has loaded it.
  bool fork_ranks = false;

  /// An exit code of rank 0 that is the program's answer (like diff's 1), not a
  /// failure: no rank is stopped, nothing is printed, and the launcher ends
  /// with it. A rank that leaves an error report has failed nevertheless. 0:
  /// none.
  int answer_code = 0;

  /// SIGTERM asks to give the machine back: a job that it ends before the ranks
  /// can say so themselves ends with ExitCode::preempted, not with 130.
  bool preemptible = false;

  /// How often all ranks start again, as new processes with the next
  /// ECHELON_GENERATION, after one of them has failed by itself; 0: never,
  /// after any failure (Restarts). The others are killed at once then. A host
  /// that is lost does not count.
  int max_restarts = 0;
  /// The last step of the job that a restart would not repeat; null: not known.
  /// On several hosts it may be one that not all of them have.
  std::function<int64_t()> last_step;

  /// What is looked at before the start and after each failure (health.h).
  HostNeeds host;

  /// The name of the job's ControlSocket, asked for once the hosts have met;
  /// null or empty: it has none.
  std::function<std::string()> control;
  /// Where Prometheus reads the job's figures: each host's of its own ranks,
  /// and the coordinating one's of the job.
  monitoring::ExporterOptions metrics;
  /// On several hosts: called when this host has an address among them, and
  /// again before a generation when the process has ended. Returns a process
  /// that it has started, which ends with the launcher and is none of the
  /// ranks'; -1: none. Null: nothing is called.
  ///
  ///   key  one that all hosts have
  std::function<pid_t(const std::string& address, const authentication::Key&)>
      on_met;

  /// How the program divides the work over another number of ranks ("fsdp=3").
  /// Throws ConfigError when it cannot; the job goes on as it is. Null: on one
  /// host the number stays, and on several the program takes it from
  /// WORLD_SIZE. On several, the host that coordinates calls it.
  std::function<std::string(int)> resize;
  /// How long a step is predicted to take with another number of ranks, in
  /// seconds; 0: not known; none: not known yet. Returns at once. Null: hosts
  /// that come are taken in whatever a step takes then.
  std::function<std::optional<double>(int)> step_seconds;
  /// How long one would take if all devices computed at their peak; the same.
  /// Null: it is not known.
  std::function<std::optional<double>(int)> peak_seconds;
  /// Prepares the program for a layout that resize() has returned (empty: the
  /// command's), on each host before its ranks start. `coordinates`: this host
  /// is the first of them.
  std::function<void(const std::string&, bool coordinates)> use_layout;
};

}  // namespace echelon::launch
