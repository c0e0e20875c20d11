// Who starts the launchers of a job's hosts, and with what: the user, an engine
// (environment/engine.h), or this process, by way of srun or ssh.
#pragma once

#include <string>
#include <vector>

#include "echelon/cli/programs.h"

namespace echelon::cli {

/// A host of --hosts or --hostfile.
struct RemoteHost {
  std::string name;   // as ssh takes it
  int num_ranks = 0;  // its slots; 0: not given
};

struct JobHosts {
  /// `started`: this launcher is one of them, or the only one. Else the
  /// launchers are still to be started.
  enum class By { started, srun, ssh };
  By by = By::started;
  int num_ranks = 0;   // of each host, as the engine says; 0: nothing does
  std::string uneven;  // Engine::uneven
  std::string engine;  // "Slurm job 42"; empty: none
  std::vector<RemoteHost> remote;  // for ssh
};

/// Puts what the engine says into `arguments` where the user has given nothing,
/// and says so to stderr, as it does where flags differ from it: flags win.
/// Throws ConfigError where the engine's launchers cannot be one job, or have
/// no token in common, and for --hosts and --hostfile that name no hosts.
JobHosts find_hosts(HostArguments& arguments);

/// Throws ConfigError, which begins with `from`, for a name that could be an
/// option of ssh, or that its shell would take apart.
void check_host_name(const std::string& from, const std::string& name);

/// The ranks of each host where the user does not say how many: the engine's,
/// or 1. Throws ConfigError where the engine has other numbers for other hosts.
int ranks_of_each(const JobHosts& hosts);

/// Says which number of ranks of each host is used where an engine has one.
void say_ranks(const JobHosts& hosts, const std::string& num_ranks);

}  // namespace echelon::cli
