#include "echelon/cli/job_hosts.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <sstream>

#include "echelon/authentication/token.h"
#include "echelon/cli/arguments.h"
#include "echelon/environment/engine.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::cli {
namespace {

using launch::Engine;

// The user's own value, or the engine's.
void take(
    const char* flag, std::string& value, const std::string& engines,
    const Engine& engine) {
  if (value.empty()) {
    value = engines;
  } else if (!engines.empty() && value != engines) {
    std::cerr << format(
        "echelon: {} {} is used, not {} as {} has it\n", flag, value, engines,
        engine.job);
  }
}

// The pods of a job share no home, so each would make a token of its own.
void check_token(const HostArguments& arguments, const Engine& engine) {
  if (engine.kind != Engine::Kind::kubernetes ||
      authentication::have_token(arguments.token_file)) {
    return;
  }
  throw ConfigError(format(
      "[launch] {}: its pods need one token, and this one has none; `kubectl "
      "create secret generic echelon --from-literal=token=$(openssl rand -hex "
      "32)` makes a secret, whose key `token` is the variable {} of all pods",
      engine.job, authentication::kTokenVariable));
}

JobHosts take_engine(const Engine& engine, HostArguments& arguments) {
  JobHosts hosts{.num_ranks = engine.num_ranks, .engine = engine.job};
  if (arguments.num_nodes == "1") {
    if (engine.num_nodes != 1) {
      std::cerr << format(
          "echelon: --nnodes 1 is used: a job of this host alone, though {} "
          "has {}\n",
          engine.job,
          engine.num_nodes == 0 ? "others" : counted(engine.num_nodes, "host"));
    }
    return hosts;
  }
  if (engine.num_nodes == 1) return hosts;
  hosts.num_ranks = std::max(1, hosts.num_ranks);
  hosts.uneven = engine.uneven;
  if (!engine.problem.empty()) throw ConfigError(engine.problem);
  if (arguments.num_nodes.empty() && engine.nodes.empty()) {
    throw ConfigError(format(
        "{} does not say how many pods it has; give --nnodes, or set "
        "PET_NNODES in its manifest; --nnodes 1 is for pods that have nothing "
        "to do with each other",
        engine.job));
  }
  if (arguments.num_nodes.empty()) {
    arguments.num_nodes = engine.nodes;
  } else if (
      engine.num_nodes > 0 &&
      most_of(arguments.num_nodes) != most_of(engine.nodes)) {
    std::cerr << format(
        "echelon: --nnodes {} is used, not {} as {} has it\n",
        arguments.num_nodes, engine.nodes, engine.job);
  }
  if (engine.kind == Engine::Kind::slurm_batch) {
    if (!arguments.join.empty() || !arguments.node_rank.empty() ||
        !arguments.master_addr.empty()) {
      return hosts;  // one of several commands of the script
    }
    hosts.by = JobHosts::By::srun;
    arguments.master_addr = "the first host";  // as srun's launchers find it
    return hosts;
  }
  check_token(arguments, engine);
  if (!arguments.join.empty()) return hosts;
  take(
      "--node-rank", arguments.node_rank, std::to_string(engine.node_rank),
      engine);
  arguments.name_may_come = arguments.master_addr.empty();
  take("--master-addr", arguments.master_addr, engine.master_addr, engine);
  take(
      "--master-port", arguments.master_port,
      engine.master_port > 0 ? std::to_string(engine.master_port) : "", engine);
  if (arguments.master_addr.empty()) {
    throw ConfigError(format(
        "{} does not say which host is the first; give --master-addr",
        engine.job));
  }
  std::cerr << format(
      "echelon: host {} of {} of {}, master {}{}\n",
      std::atoi(arguments.node_rank.c_str()) + 1, most_of(arguments.num_nodes),
      engine.job, arguments.master_addr,
      arguments.master_port.empty() ? "" : ":" + arguments.master_port);
  return hosts;
}

std::vector<RemoteHost> hosts_of_list(const std::string& list) {
  std::vector<RemoteHost> hosts;
  std::istringstream names(list);
  for (std::string name; std::getline(names, name, ',');) {
    check_host_name("--hosts " + list, name);
    hosts.push_back({name});
  }
  return hosts;
}

// As mpirun takes it: "host slots=8", with comments after #.
std::vector<RemoteHost> hosts_of_file(const std::string& path) {
  std::vector<RemoteHost> hosts;
  std::ifstream file(path);
  if (!file) {
    throw ConfigError(format(
        "--hostfile {}: cannot be read: {}", path, std::strerror(errno)));
  }
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    const std::string from = format("--hostfile {}, line {}", path, ++number);
    std::istringstream words(line.substr(0, line.find('#')));
    RemoteHost host;
    if (!(words >> host.name)) continue;
    check_host_name(from, host.name);
    for (std::string word; words >> word;) {
      const std::string slots = "slots=";
      if (!word.starts_with(slots)) {
        throw ConfigError(format(
            "{}: \"{}\" is not understood; a line is a host, and slots=RANKS "
            "after it",
            from, word));
      }
      host.num_ranks = static_cast<int>(parse_count(
          from + ", slots", word.substr(slots.size()), 1, kMaxRanks));
    }
    hosts.push_back(host);
  }
  if (hosts.empty()) {
    throw ConfigError(format("--hostfile {}: it names no host", path));
  }
  return hosts;
}

/// "ann@10.0.0.2" -> "10.0.0.2".
std::string address_of_name(const std::string& name) {
  return name.substr(name.find('@') + 1);
}

JobHosts take_remote(HostArguments& arguments) {
  const auto exclude = [](const char* flag, const std::string& value) {
    if (value.empty()) return;
    throw ConfigError(format(
        "{} {}: --hosts and --hostfile start the launcher of every host, and "
        "number them; leave it out",
        flag, value));
  };
  exclude("--node-rank", arguments.node_rank);
  exclude("--join", arguments.join);
  if (!arguments.hosts.empty()) exclude("--hostfile", arguments.hostfile);
  JobHosts hosts{.by = JobHosts::By::ssh};
  hosts.remote = arguments.hosts.empty() ? hosts_of_file(arguments.hostfile)
                                         : hosts_of_list(arguments.hosts);
  const std::string number = std::to_string(hosts.remote.size());
  if (arguments.num_nodes.empty()) {
    arguments.num_nodes = number;
  } else if (most_of(arguments.num_nodes) != number) {
    throw ConfigError(format(
        "--nnodes {}: there are {}; leave it out, or give MIN:{} for a job "
        "that goes on with fewer",
        arguments.num_nodes, counted(hosts.remote.size(), "host"), number));
  }
  if (arguments.master_addr.empty()) {
    arguments.master_addr = address_of_name(hosts.remote[0].name);
  }
  hosts.num_ranks = hosts.remote[0].num_ranks;
  return hosts;
}

}  // namespace

void check_host_name(const std::string& from, const std::string& name) {
  const bool good =
      !name.empty() && name[0] != '-' &&
      std::ranges::all_of(name, [](unsigned char c) {
        return std::isalnum(c) != 0 || std::strchr("._-@:[]%", c) != nullptr;
      });
  if (!good) {
    throw ConfigError(format(
        "{}: \"{}\" is no name of a host; one is like node-a or ann@10.0.0.2",
        from, name));
  }
}

JobHosts find_hosts(HostArguments& arguments) {
  if (!arguments.hosts.empty() || !arguments.hostfile.empty()) {
    return take_remote(arguments);
  }
  const auto engine = launch::find_engine();
  return engine ? take_engine(*engine, arguments) : JobHosts();
}

int ranks_of_each(const JobHosts& hosts) {
  if (!hosts.uneven.empty()) {
    throw ConfigError(format(
        "{} has {}, and this command starts as many ranks on each: give -n, or "
        "ask Slurm for --ntasks-per-node or --gpus-per-node",
        hosts.engine, hosts.uneven));
  }
  return std::max(1, hosts.num_ranks);
}

void say_ranks(const JobHosts& hosts, const std::string& num_ranks) {
  if (hosts.engine.empty() || hosts.num_ranks <= 1 || num_ranks.empty()) return;
  const std::string engines = std::to_string(hosts.num_ranks);
  if (num_ranks == engines) {
    std::cerr << format(
        "echelon: {} ranks a host, as {} has it\n", engines, hosts.engine);
  } else {
    std::cerr << format(
        "echelon: -n {} is used, not {} as {} has it\n", num_ranks, engines,
        hosts.engine);
  }
}

}  // namespace echelon::cli
