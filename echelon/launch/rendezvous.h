// Where the ranks of a job meet: rank 0's port, and who has which rank.
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

/// Keeps other launchers of this host off `address` and `port` for as long as
/// the returned file is open: a port that is bound but not listened on does
/// not. Throws ConfigError when another job has it.
int claim_port(const std::string& address, int port);

/// Binds to `address` (a name or a number) and `port` (0: any free one).
/// Throws ConfigError when the address is not of this host or the port is
/// taken.
BoundSocket bind_master(const std::string& address, int port);

/// Where the ranks of this host stand in the job.
struct JobStart {
  JobPlace place;
  int first_rank = 0;
  int world_size = 1;
  int master_fd = -1;  // on node 0; the caller owns it, and
  int claim_fd = -1;   // this: see claim_port
};

/// A job on this host alone: its store is for 127.0.0.1, whatever master_addr
/// of this host is given.
JobStart start_alone(const LaunchOptions& options);

}  // namespace echelon::launch
