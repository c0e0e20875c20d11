// The rendezvous of the launchers of several hosts: node 0 listens at the
// master's address and port, and the others try to connect until it answers.
#pragma once

#include <string>
#include <vector>

#include "echelon/launch/job_start.h"
#include "echelon/launch/options.h"

namespace echelon::launch {

/// An open connection to another host's launcher.
struct HostLink {
  int fd = -1;
  int node = 0;
  std::string address;  // the other's, numeric
  std::string unread;   // bytes that were received and not used yet
};

struct Rendezvous {
  JobStart start;
  std::vector<HostLink> links;  // node 0: one per other node; else: node 0
};

/// Called by node 0: waits for all other nodes and gives each its place. The
/// store's socket is bound to the same port, on which nobody listens any more
/// when this returns. Throws ConfigError with the missing nodes after
/// join_timeout.
Rendezvous host_rendezvous(const LaunchOptions& options);

/// Called by every other node. Throws ConfigError when node 0 does not answer
/// in time or refuses (with its reason), or when another program answers.
Rendezvous join_rendezvous(const LaunchOptions& options);

}  // namespace echelon::launch
