#include "echelon/cli/programs.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>

#include "echelon/cli/arguments.h"
#include "echelon/error.h"
#include "echelon/launch/cause.h"
#include "echelon/launch/guard.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMaxBytes = 1 << 20;

[[noreturn]] void become(
    const std::vector<std::string>& command,
    const std::vector<std::pair<std::string, std::string>>& variables, int out,
    int err) {
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  ::dup2(out, 1);
  ::dup2(err, 2);
  const int null = ::open("/dev/null", O_RDONLY);
  ::dup2(null, 0);
  for (const auto& [name, value] : variables) {
    ::setenv(name.c_str(), value.c_str(), 1);
  }
  const auto argv = launch::argv_of(command);
  ::execv(argv[0], argv.data());
  ::_exit(127);
}

/// Reads both pipes until they close (true) or the time is up.
bool drain(int out, int err, Clock::time_point deadline, Captured& captured) {
  pollfd files[2] = {{out, POLLIN, 0}, {err, POLLIN, 0}};
  std::string* texts[2] = {&captured.out, &captured.err};
  while (files[0].fd >= 0 || files[1].fd >= 0) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - Clock::now());
    if (left.count() <= 0) return false;
    ::poll(files, 2, static_cast<int>(left.count()));
    for (int i = 0; i < 2; ++i) {
      if (files[i].fd < 0 || files[i].revents == 0) continue;
      char buffer[4096];
      const ssize_t bytes = ::read(files[i].fd, buffer, sizeof(buffer));
      if (bytes <= 0) {
        files[i].fd = -1;
      } else if (texts[i]->size() < kMaxBytes) {
        texts[i]->append(buffer, static_cast<size_t>(bytes));
      }
    }
  }
  return true;
}

}  // namespace

void add_host_arguments(
    Command& command, HostArguments& arguments, HostsOf hosts) {
  const auto option = [&](const char* name, std::string& value,
                          const char* type, const char* help) {
    command.option(name, value, type, help);
  };
  const bool elastic = hosts == HostsOf::elastic;
  option(
      "--nnodes", arguments.num_nodes, elastic ? "HOSTS|MIN:MAX" : "HOSTS",
      elastic ? "hosts of the job (default: 1); start the command on each. "
                "MIN:MAX: hosts may come and go while it runs"
              : "hosts of the job (default: 1); start the command on each");
  option(
      "--node-rank", arguments.node_rank, "RANK",
      "rank of this host, from 0 (default: 0)");
  option(
      "--master-addr", arguments.master_addr, "ADDRESS",
      "address of node 0, when there are several hosts");
  option(
      "--master-port", arguments.master_port, "PORT",
      "port at which node 0 waits for the other hosts (default: 29500); on "
      "one host, of rank 0's store (default: a free one)");
  if (elastic) {
    option(
        "--join", arguments.join, "ADDRESS[:PORT]",
        "come to a job that runs, by way of any of its hosts, in place of "
        "--node-rank and --master-addr");
    option(
        "--hosts", arguments.hosts, "HOSTS",
        "start this command on these hosts (a,b,c) by ssh, in this folder, "
        "which they share; it ends on all of them together");
    option(
        "--hostfile", arguments.hostfile, "FILE",
        "the same for the hosts of a file: one a line, with slots=RANKS after "
        "it where -n is not given");
    option(
        "--ssh", arguments.ssh, "COMMAND",
        "what logs in to a host for --hosts and --hostfile (default: ssh -o "
        "BatchMode=yes)");
  }
  option(
      "--token-file", arguments.token_file, "FILE",
      "the secret that all hosts must have, 64 hexadecimal digits in a file "
      "with mode 0600 (default: token in ~/.config/echelon, made when missing; "
      "copy it to hosts that do not share it)");
  command.flag(
      "--tls", arguments.tls,
      "encrypt what launchers tell each other, the ranks' store, and copies of "
      "the state in memory (TLS 1.3), on all hosts; not what the collectives "
      "send");
}

std::string most_of(const std::string& nodes) {
  return nodes.substr(nodes.find(':') + 1);
}

launch::LaunchOptions
host_options(const HostArguments& arguments, HostsOf hosts) {
  launch::LaunchOptions options;
  options.token_file = arguments.token_file;
  options.tls = arguments.tls;
  // In Kubernetes the name of a pod comes seconds after the pod.
  options.name_may_come = arguments.name_may_come ||
                          std::getenv("KUBERNETES_SERVICE_HOST") != nullptr;
  constexpr int kMostHosts = 1 << 16;
  const std::string nodes =
      arguments.num_nodes.empty() ? "1" : arguments.num_nodes;
  const size_t colon = nodes.find(':');
  if (colon != std::string::npos) {
    if (hosts == HostsOf::fixed) {
      throw ConfigError(format(
          "--nnodes {}: the hosts of this command do not change; give one "
          "number",
          nodes));
    }
    options.least_nodes = static_cast<int>(
        parse_count("--nnodes MIN", nodes.substr(0, colon), 1, kMostHosts));
  }
  options.num_nodes = static_cast<int>(parse_count(
      colon == std::string::npos ? "--nnodes" : "--nnodes MAX", most_of(nodes),
      std::max(1, options.least_nodes), kMostHosts));
  options.node_rank = static_cast<int>(parse_count(
      "--node-rank", arguments.node_rank.empty() ? "0" : arguments.node_rank, 0,
      options.num_nodes - 1));
  if (!arguments.master_port.empty()) {
    options.master_port = static_cast<int>(
        parse_count("--master-port", arguments.master_port, 1, 65535));
  }
  if (!arguments.join.empty()) {
    if (options.num_nodes == 1) {
      throw ConfigError(format(
          "--join {}: give --nnodes too, as the other hosts have it",
          arguments.join));
    }
    if (!arguments.master_addr.empty()) {
      throw ConfigError(format(
          "--join {}: is in place of --master-addr {}; give one of them",
          arguments.join, arguments.master_addr));
    }
    options.joins = true;
    options.master_addr = arguments.join;
    // [fd00::5]:29500, host:29500, or without a port.
    const size_t end = arguments.join.rfind(':');
    const bool has_port =
        end != std::string::npos &&
        (arguments.join[0] == '[' ? arguments.join[end - 1] == ']'
                                  : arguments.join.find(':') == end);
    if (has_port) {
      options.master_port = static_cast<int>(
          parse_count("--join PORT", arguments.join.substr(end + 1), 1, 65535));
      options.master_addr = arguments.join.substr(0, end);
    }
    std::erase_if(
        options.master_addr, [](char c) { return c == '[' || c == ']'; });
    return options;
  }
  if (options.num_nodes > 1 && arguments.master_addr.empty()) {
    throw ConfigError(
        "--nnodes " + nodes +
        ": needs --master-addr, the address of node 0 as the other hosts reach "
        "it");
  }
  options.master_addr = arguments.master_addr;
  return options;
}

void add_metrics_arguments(
    Command& command, std::string& address, std::string& file) {
  command.option(
      "--metrics-address", address, "[HOST:]PORT",
      "serve the job's figures to Prometheus there, on the page /metrics "
      "(default: nowhere; HOST is 127.0.0.1)");
  command.option(
      "--metrics-file", file, "FILE",
      "write the same text into this file while the job runs, for the textfile "
      "collector of Prometheus' node exporter");
}

int parse_max_restarts(const std::string& text) {
  return static_cast<int>(parse_count("--max-restarts", text, 0, 1'000'000));
}

void check_hosts(const Job& job, int num_nodes) {
  if (num_nodes == 1) return;
  const int64_t ranks = job.layout.num_ranks();
  if (ranks % num_nodes != 0) {
    throw ConfigError(format(
        "--nnodes {}: layout {} has {}, and each host has as many as the "
        "others; give -n, the ranks of one host, and let the degrees' product "
        "be {} times that",
        num_nodes, to_string(job.layout), counted(ranks, "rank"), num_nodes));
  }
  if (job.train.ranks == RankKind::threads) throw ConfigError(kThreadsOnHosts);
}

std::string find_echelon_train() {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::string path = (self.parent_path() / "echelon-train").string();
  if (::access(path.c_str(), X_OK) != 0) {
    throw ConfigError(
        path + ": " + std::strerror(errno) +
        "; echelon needs it for this command, in its own folder: build with "
        "LibTorch (ECHELON_LIBTORCH) and install both");
  }
  return path;
}

std::string control_name(const std::filesystem::path& run) {
  struct stat folder {};
  if (::stat(run.c_str(), &folder) != 0) return "";
  return format("echelon-run-{:x}-{:x}", folder.st_dev, folder.st_ino);
}

void become_echelon_train(const std::vector<std::string>& arguments) {
  std::vector<std::string> command = {find_echelon_train()};
  command.insert(command.end(), arguments.begin(), arguments.end());
  std::cout.flush();
  ::execv(command[0].c_str(), launch::argv_of(command).data());
  throw ConfigError(
      command[0] + ": cannot be started: " + std::strerror(errno));
}

int launch_echelon_train(
    const std::vector<std::string>& arguments, int64_t num_ranks,
    RankKind ranks, launch::LaunchOptions options) {
  options.command = {find_echelon_train()};
  options.command.insert(
      options.command.end(), arguments.begin(), arguments.end());
  options.num_ranks = static_cast<int>(num_ranks / options.num_nodes);
  if (ranks == RankKind::threads) {
    options.command.insert(
        options.command.end(), {"--threads", std::to_string(num_ranks)});
    options.num_ranks = 1;
  }
  if (options.terminal != launch::Terminal::hidden) {
    options.terminal = launch::Terminal::rank_zero;
  }
  options.listen_early = true;
  options.fork_ranks = true;
  return launch::run(options);
}

ScratchConfig::ScratchConfig(const Job& job)
    : path_(folder_.path() + "/config.toml") {
  write(job);
}

void ScratchConfig::write(const Job& job) const {
  std::ofstream file(path_);
  file << to_toml(job);
  file.close();
  if (!file) {
    throw ConfigError(path_ + ": cannot be written; is the disk full?");
  }
}

Captured capture(
    const std::vector<std::string>& command, std::chrono::milliseconds limit,
    const std::vector<std::pair<std::string, std::string>>& variables) {
  Captured captured;
  int out[2], err[2];
  if (::pipe2(out, O_CLOEXEC) != 0) return captured;
  if (::pipe2(err, O_CLOEXEC) != 0) {
    ::close(out[0]);
    ::close(out[1]);
    return captured;
  }
  const pid_t child = ::fork();
  if (child == 0) become(command, variables, out[1], err[1]);
  ::close(out[1]);
  ::close(err[1]);
  if (child > 0) {
    captured.timed_out = !drain(out[0], err[0], Clock::now() + limit, captured);
    // SIGTERM first: a launcher then takes its ranks along.
    if (captured.timed_out) {
      ::kill(child, SIGTERM);
      drain(out[0], err[0], Clock::now() + std::chrono::seconds(10), captured);
      ::kill(child, SIGKILL);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    captured.exit_code = launch::exit_code_of(status);
  }
  ::close(out[0]);
  ::close(err[0]);
  return captured;
}

}  // namespace echelon::cli
