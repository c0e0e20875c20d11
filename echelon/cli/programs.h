// The programs that commands start: echelon-train, and others whose output is
// captured.
#pragma once

#include <chrono>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "echelon/cli/command_line.h"
#include "echelon/job/job.h"
#include "echelon/launch/launch.h"
#include "echelon/launch/scratch.h"

namespace echelon::cli {

/// The hosts of a job, as written; empty: not given. Each host has a launcher
/// of its own.
struct HostArguments {
  std::string num_nodes;  // 1 when not given
  std::string node_rank;  // 0 when not given
  std::string master_addr;
  std::string master_port;
  std::string join;
  std::string token_file;
  bool tls = false;
  // What starts the launchers of the other hosts (job_hosts.h).
  std::string hosts;
  std::string hostfile;
  std::string ssh = "ssh -o BatchMode=yes";
  // An engine gave master_addr, and its name may not exist yet.
  bool name_may_come = false;
};

/// "MIN:MAX" -> "MAX", "2" -> "2".
std::string most_of(const std::string& nodes);

/// Whether hosts may come and go while the command runs.
enum class HostsOf { fixed, elastic };

/// Adds --nnodes, --node-rank, --master-addr, --master-port, --token-file and
/// --tls; for `elastic` also --join, --hosts, --hostfile and --ssh.
void add_host_arguments(
    Command& command, HostArguments& arguments, HostsOf hosts = HostsOf::fixed);

/// Their values in the options of a launch. Throws ConfigError when one is out
/// of range, when several hosts have no master address, and for --nnodes
/// MIN:MAX where hosts are `fixed`.
launch::LaunchOptions
host_options(const HostArguments& arguments, HostsOf hosts = HostsOf::fixed);

/// Adds --metrics-address and --metrics-file. They are checked when the launch
/// begins.
void add_metrics_arguments(
    Command& command, std::string& address, std::string& file);

/// The value of --max-restarts. Throws ConfigError when it is no count.
int parse_max_restarts(const std::string& text);

/// The name of the launch::ControlSocket of the job that writes to the folder
/// `run`; empty when there is no such folder.
std::string control_name(const std::filesystem::path& run);

/// Throws ConfigError when the hosts cannot share the job's ranks equally, or
/// the ranks are threads.
void check_hosts(const Job& job, int num_nodes);

inline constexpr const char* kThreadsOnHosts =
    "--ranks threads: threads are on one host; leave it out with --nnodes";

/// echelon-train in the folder of this program. Throws ConfigError when it is
/// not there.
std::string find_echelon_train();

/// Replaces this process by echelon-train with these arguments.
[[noreturn]] void
become_echelon_train(const std::vector<std::string>& arguments);

/// Runs echelon-train with `arguments` on `num_ranks` ranks, each a process or,
/// with RankKind::threads, a thread of one process. Rank 0 has the terminal.
/// With several hosts in `options`, each starts an equal share of the ranks.
/// Returns the exit code.
int launch_echelon_train(
    const std::vector<std::string>& arguments, int64_t num_ranks,
    RankKind ranks, launch::LaunchOptions options = {});

/// A job's resolved configuration in a file for echelon-train, removed with
/// the object.
class ScratchConfig {
 public:
  /// Throws ConfigError when the folder for temporary files cannot be written.
  explicit ScratchConfig(const Job& job);

  const std::string& path() const { return path_; }
  /// Replaces it, in the same file.
  void write(const Job& job) const;

 private:
  launch::ScratchFolder folder_;
  std::string path_;
};

struct Captured {
  int exit_code = -1;      // 128 + signal for a signal; -1: could not start
  bool timed_out = false;  // it was killed
  std::string out;
  std::string err;
};

/// Runs `command` (an absolute path and arguments) with `variables` added to
/// the environment until it ends, or until `limit` has passed and it is killed.
/// Keeps at most 1 MiB of each stream.
Captured capture(
    const std::vector<std::string>& command, std::chrono::milliseconds limit,
    const std::vector<std::pair<std::string, std::string>>& variables = {});

}  // namespace echelon::cli
