// The start of a job: the port of rank 0's store, and the ranks of this host.
#pragma once

#include <netdb.h>
#include <sys/un.h>

#include <memory>
#include <string>
#include <utility>

#include "echelon/environment/rank_environment.h"
#include "echelon/launch/options.h"
#include "echelon/text/file_descriptor.h"

namespace echelon::launch {

/// A TCP socket bound to an address of this host, not listening yet.
struct BoundSocket {
  FileDescriptor socket;
  std::string address;  // numeric
  int port = 0;
};

/// The address of a Unix socket by an abstract name. Such a name lives in the
/// network namespace, as a port does, and ends with the process.
std::pair<sockaddr_un, socklen_t> abstract_address(const std::string& name);

/// Keeps other launchers of this host off `address` and `port` while the
/// returned file is open; a port that is bound but not listened on does not.
/// Throws ConfigError when another job has the port.
FileDescriptor claim_port(const std::string& address, int port);

using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

/// The addresses of the master, given by name or number. Null, with a reason,
/// where it may have some later: where the name server does not answer, and
/// where the name does not exist but may come. Throws ConfigError elsewhere.
Addresses find_address(
    const std::string& address, int port, bool name_may_come,
    std::string& reason);
/// The same; throws ConfigError where there is none.
Addresses resolve(const std::string& address, int port);

/// The port at which node 0 of several hosts listens, and its address and port
/// in words: "10.0.0.1, port 29500".
int master_port(const LaunchOptions& options);
std::string master_text(const LaunchOptions& options);

/// Binds to `address` (a name or a number) and `port` (0: any free one).
/// Throws ConfigError when the address is not of this host or the port is
/// taken.
BoundSocket bind_master(const std::string& address, int port);

/// The place of this host's ranks in the job.
struct JobStart {
  JobPlace place;
  int first_rank = 0;
  int world_size = 1;
  int node_rank = 0;
  int num_nodes = 1;
  /// How the ranks divide the work; empty: as the command says.
  std::string layout;
  /// Whether another generation may follow. When a rank fails and
  /// Restarts::helps(), the others are killed at once then.
  bool may_restart = false;
  FileDescriptor master;  // on node 0, bound to the port
  FileDescriptor claim;   // see claim_port
};

/// A job on this host alone. Its store listens on 127.0.0.1, whichever of this
/// host's addresses master_addr is.
JobStart start_alone(const LaunchOptions& options);

}  // namespace echelon::launch
