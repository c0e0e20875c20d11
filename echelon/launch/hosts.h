// The launchers of a job's hosts, in touch with each other: node 0 listens at
// the master's address until all have come, then that port is the store's. The
// connections stay open for as long as the job runs, so that a failure or a
// Ctrl-C on one host is known on all at once, and all end with one exit code.
#pragma once

#include <string>
#include <vector>

#include "echelon/launch/cause.h"
#include "echelon/launch/options.h"
#include "echelon/launch/rendezvous.h"

namespace echelon::launch {

constexpr int kDefaultMasterPort = 29500;

/// What another host's launcher said.
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
  /// A job of one host: there is nobody to talk to.
  Hosts() = default;
  /// Meets the others; blocks until all have come. Throws ConfigError when they
  /// do not within options.join_timeout, contradict each other, or the master's
  /// address is not one to meet at.
  static Hosts meet(const LaunchOptions& options, JobStart& start);

  Hosts(Hosts&& other) noexcept;
  Hosts& operator=(Hosts&&) = delete;
  ~Hosts();

  bool alone() const { return num_nodes_ == 1; }
  /// "node 1, 10.0.0.2" of this host; empty when alone.
  const std::string& name() const { return name_; }

  /// What to poll for POLLIN; -1 for connections that have ended.
  std::vector<int> files() const;
  /// Reads what came on connection `index` of files().
  std::vector<HostEvent> read(size_t index);

  /// Each tells all others, once.
  void say_failed();
  void say_stopped(int signal);
  /// How this host's ranks ended; the job's end is known once all have said it.
  void say_outcome(Outcome outcome);
  /// How the job ended, once that is known; node 0 has then told the others.
  const std::optional<Outcome>& end() const { return end_; }
  /// Nobody else is waited for any longer.
  void give_up();

 private:
  struct Peer {
    int fd = -1;
    int node = 0;
    std::string address;
    std::string unread;
  };

  Hosts(const LaunchOptions& options)
      : num_nodes_(options.num_nodes), node_rank_(options.node_rank) {}
  void take(
      const Peer& peer, const std::string& line,
      std::vector<HostEvent>& events);
  void lose(Peer& peer, std::vector<HostEvent>& events);
  void note_failed(int node);
  void note_outcome(int node, Outcome outcome);
  void tell(const std::string& line, int except_node = -1);

  int num_nodes_ = 1;
  int node_rank_ = 0;
  std::string name_;
  std::vector<Peer> peers_;  // on node 0: all others; elsewhere: node 0
  bool said_failed_ = false;
  bool said_stopped_ = false;
  // On node 0: who failed, in order, and how each node ended.
  std::vector<int> failed_order_;
  std::vector<std::optional<Outcome>> outcomes_;
  std::optional<Outcome> end_;
};

}  // namespace echelon::launch
