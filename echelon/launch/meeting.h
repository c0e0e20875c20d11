// How the launchers of several hosts find each other: node 0 waits at the
// master's address and port, the others knock until it answers.
#pragma once

#include <string>
#include <vector>

#include "echelon/launch/options.h"
#include "echelon/launch/rendezvous.h"

namespace echelon::launch {

/// An open connection to another host's launcher.
struct HostLink {
  int fd = -1;
  int node = 0;
  std::string address;  // the other's, numeric
  std::string unread;   // bytes that came with what was read last
};

struct Meeting {
  JobStart start;
  std::vector<HostLink> links;  // node 0: one per other node; else: node 0
};

/// Node 0: waits for all others, gives each its place. The store's socket is
/// bound to the same port, which nobody listens on any more when this returns.
/// Throws ConfigError, which names the missing nodes, after join_timeout.
Meeting host_meeting(const LaunchOptions& options);

/// Every other node. Throws ConfigError when node 0 does not answer in time,
/// refuses (its reason is shown), or something else answers.
Meeting join_meeting(const LaunchOptions& options);

}  // namespace echelon::launch
