// The start of a job: the port of rank 0's store, and the ranks of this host.
#pragma once

#include <optional>
#include <string>

#include "echelon/environment/launch_environment.h"
#include "echelon/launch/options.h"

namespace echelon::launch {

/// A TCP socket bound to an address of this host, not listening yet.
struct BoundSocket {
  int fd = -1;
  std::string address;  // numeric
  int port = 0;
};

/// Keeps other launchers of this host off `address` and `port` while the
/// returned file is open; a port that is bound but not listened on does not.
/// Throws ConfigError when another job has the port.
int claim_port(const std::string& address, int port);

/// Binds to `address` (a name or a number) and `port` (0: any free one).
/// Throws ConfigError when the address is not of this host or the port is
/// taken.
BoundSocket bind_master(const std::string& address, int port);

/// The place of this host's ranks in the job.
struct JobStart {
  JobPlace place;
  int first_rank = 0;
  int world_size = 1;
  int master_fd = -1;  // on node 0; the caller owns both files
  int claim_fd = -1;   // see claim_port
};

/// A job on this host alone. Its store listens on 127.0.0.1, whichever of this
/// host's addresses master_addr is.
JobStart start_alone(const LaunchOptions& options);

}  // namespace echelon::launch
