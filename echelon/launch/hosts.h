// The connections between the launchers of a job's hosts. Node 0 listens at the
// master's address until all have come; then the store uses that port. The
// connections stay open while the job runs, so that a failure or a Ctrl-C on
// one host is known on all at once, and all end with one exit code. Each begins
// with the proof that both ends have the same token.
#pragma once

#include <string>
#include <vector>

#include "echelon/authentication/token.h"
#include "echelon/launch/cause.h"
#include "echelon/launch/job_start.h"
#include "echelon/launch/options.h"

namespace echelon::launch {

/// An open connection to another host's launcher.
struct HostLink {
  FileDescriptor socket;
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
/// when this returns. A connection that does not prove the token is closed, and
/// the user is told. Throws ConfigError with the missing nodes after
/// join_timeout.
Rendezvous host_rendezvous(
    const LaunchOptions& options, const authentication::Token& token);

/// Called by every other node. Throws ConfigError when node 0 does not answer
/// in time, has another token or refuses (with its reason), or when another
/// program answers.
Rendezvous join_rendezvous(
    const LaunchOptions& options, const authentication::Token& token);

/// A message of another host's launcher.
struct HostEvent {
  enum Kind {
    failed,   // the job fails: stop your ranks
    stopped,  // the user stopped the job there, by `signal`
  };
  Kind kind = failed;
  int signal = 0;
};

class Hosts {
 public:
  /// A job of one host.
  Hosts() = default;
  /// Connects with the other hosts; blocks until all have come. Throws
  /// ConfigError when there is no token, when they do not come within
  /// options.join_timeout or contradict each other, or when the master's
  /// address is unusable.
  static Hosts meet(const LaunchOptions& options, JobStart& start);

  bool alone() const { return num_nodes_ == 1; }

  /// The files to poll for POLLIN; -1 for connections that have ended.
  std::vector<int> files() const;
  /// Reads from connection `index` of files().
  std::vector<HostEvent> read(size_t index);

  /// Tell all other hosts, once.
  void say_failed();
  void say_stopped(int signal);
  /// Reports how this host's ranks ended; the job's end is known once all hosts
  /// have reported.
  void say_outcome(Outcome outcome);
  /// How the job ended, once that is known; node 0 has then told the others.
  const std::optional<Outcome>& end() const { return end_; }
  /// Stops waiting for the other hosts.
  void give_up();

 private:
  Hosts(const LaunchOptions& options)
      : num_nodes_(options.num_nodes), node_rank_(options.node_rank) {}
  void take(
      const HostLink& peer, const std::string& line,
      std::vector<HostEvent>& events);
  void lose(HostLink& peer, std::vector<HostEvent>& events);
  void note_failed(int node);
  void note_outcome(int node, Outcome outcome);
  void tell(const std::string& line, int except_node = -1);

  int num_nodes_ = 1;
  int node_rank_ = 0;
  std::string name_;             // "node 1, 10.0.0.2"; empty when alone
  std::vector<HostLink> peers_;  // on node 0: all others; elsewhere: node 0
  bool said_failed_ = false;
  bool said_stopped_ = false;
  // On node 0: the nodes that failed, in order, and how each node ended.
  std::vector<int> failed_order_;
  std::vector<std::optional<Outcome>> outcomes_;
  std::optional<Outcome> end_;
};

}  // namespace echelon::launch
