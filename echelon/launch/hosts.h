// The hosts of a job, as the launcher of one of them sees them.
//
// One host coordinates: node 0. All others have a connection to it, which
// begins with the proof that both ends have the same token. A failure or a
// Ctrl-C on one host is known on all at once through it, and all end with one
// exit code. Each launcher also listens, so that hosts can come while the job
// runs, and so that the others find each other when the coordinator is lost.
//
// A job lives in generations. Within one, hosts and ranks do not change
// (Job::run). Between two (next()), hosts that were lost are left out and those
// that came are taken in.
#pragma once

#include <poll.h>

#include <chrono>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "echelon/authentication/token.h"
#include "echelon/launch/cause.h"
#include "echelon/launch/host_link.h"
#include "echelon/launch/host_listener.h"
#include "echelon/launch/job_start.h"
#include "echelon/launch/options.h"
#include "echelon/launch/signals.h"

namespace echelon::launch {

/// A message of another host's launcher.
struct HostEvent {
  enum Kind {
    failed,   // the job fails: stop your ranks
    stopped,  // the user stopped the job there, by a signal
    signal,   // a signal for all ranks
    changes,  // hosts come or leave: the ranks save and end, as at a stop
    hangs,    // no host's ranks make progress, and those here are behind
  };
  Kind kind = failed;
  int number = 0;  // of the signal
};

/// Whether the hosts that are together may go on, so that two halves of a job
/// never both do: more than half of those that were in the generation before
/// and are not known to be dead. Of two halves, the one with the coordinator.
bool have_quorum(int present, int members, int dead, bool coordinator);

class Hosts {
 public:
  /// A job of one host.
  Hosts() = default;
  /// Node 0 listens at the master's address; the others connect there, or to
  /// the host that options.join names. Throws ConfigError when there is no
  /// token, when node 0 does not answer within options.join_timeout, has
  /// another token or refuses (with its reason), when another program answers,
  /// or when the master's address is unusable. `options` must outlive this.
  static Hosts meet(const LaunchOptions& options);

  bool alone() const { return options_ == nullptr; }
  /// Whether this host decides how the job goes on.
  bool coordinates() const { return coordinates_; }
  /// How many hosts are in the generation.
  int num_hosts() const { return static_cast<int>(members_.size()); }

  /// The next generation, once enough hosts are there; the coordinator starts
  /// it. Nothing when the job is over for this host: exit_code() is how.
  /// `may_restart`: on the coordinator, whether it may be followed by another
  /// one. Throws ConfigError when the first generation cannot start.
  std::optional<JobStart> next(bool may_restart, SignalFile& signals);
  int exit_code() const { return exit_code_; }
  /// A key for one purpose, which all hosts of the job have after next().
  authentication::Key key_for(const std::string& purpose) const;
  /// The coordinator tells the others that the job is over.
  void finish(int exit_code);

  // For the event loop of a generation.

  void add_files(std::vector<pollfd>& files) const;
  /// Takes what has come, given what add_files() added, and what time has
  /// brought.
  std::vector<HostEvent> serve(const pollfd* files);
  /// When serve() wants to be called next.
  std::optional<TimePoint> deadline() const;
  /// Whether a host has been silent for so long that it may be lost.
  bool doubtful() const;
  /// Whether there should be a new generation with other hosts: some have come
  /// and make it faster, or one leaves.
  bool wants_change();
  /// What the last change has cost: the time in which no step was done.
  void note_change(std::chrono::duration<double> time) { change_ = time; }

  /// How many collectives this host's last rank has issued, when its ranks make
  /// no progress; -1 when they do, or may take any time. The job hangs when
  /// that is so on all hosts.
  void set_stalled(int64_t collectives) { stalled_ = collectives; }
  /// Says that this launcher may do something else for so long.
  void say_busy(std::chrono::milliseconds at_most);
  /// Tell all other hosts, once in a generation.
  void say_failed();
  void say_stopped(int signal);
  void say_changes();
  /// Sends the ranks of all other hosts a signal.
  void say_signal(int signal);
  /// This host leaves the job once the ranks have saved. Returns why it cannot,
  /// or nothing.
  std::string leave();
  /// Whether this host has coordinated and leaves: the others will go on.
  bool leaves() const { return coordinates_ && leaves_; }
  /// Reports how this host's ranks ended; the generation's end is known once
  /// all hosts have reported.
  void say_outcome(Outcome outcome);
  /// How the generation ended, once that is known; the coordinator has then
  /// told the others.
  const std::optional<Outcome>& end() const { return end_; }
  /// Stops waiting for the other hosts.
  void give_up();

 private:
  /// Another host: on the coordinator each of the others, elsewhere the
  /// coordinator alone.
  struct Peer {
    HostLink link;
    int node = -1;    // in this generation; -1: it is not in it yet
    int wanted = -1;  // its --node-rank
    int num_ranks = 0;
    Endpoint place;                     // where its launcher listens
    std::chrono::milliseconds busy{0};  // it said that it may be silent so long
    bool leaves = false;
    int64_t stalled = -1;  // set_stalled() there
  };
  struct Member {
    Endpoint place;
    int num_ranks = 0;
  };

  // A generation, in hosts.cpp.
  void read(Peer& peer, std::vector<HostEvent>& events);
  void take(
      Peer& peer, const nlohmann::json& message,
      std::vector<HostEvent>& events);
  void lose(Peer& peer, std::vector<HostEvent>& events);
  void pass_time(std::vector<HostEvent>& events);
  void look_for_hangs(std::vector<HostEvent>& events);
  void note_failed(int node);
  void pass_on_failure(int node);
  void note_outcome(int node, Outcome outcome);
  void tell(const nlohmann::json& message, int except_node = -2);
  void begin_generation();

  // Who is in the job, in membership.cpp; meet() is in rendezvous.cpp, and what
  // hosts do without a coordinator in regroup.cpp.
  nlohmann::json hello() const;
  void take_caller(HostListener::Caller caller);
  void tell_to_wait(Peer& peer) const;
  void set_members(std::vector<Member> members);
  void note_members(const nlohmann::json& message);
  void note_waiting(const nlohmann::json& message);
  std::string take_hello(Peer& newcomer, const nlohmann::json& hello);
  std::string missing() const;
  std::vector<bool> present() const;
  bool wait(
      SignalFile& signals, int timeout_ms,
      const std::vector<pollfd>& more = {});
  void stop(int signal);
  std::optional<JobStart> gather(bool may_restart, SignalFile& signals);
  int total_ranks() const;
  bool has_layout(int num_ranks);
  bool pays(int now, int then, double change);
  size_t newcomers(double change);
  bool choose_layout();
  JobStart start_generation(bool may_restart);
  std::optional<JobStart> wait_for_start(SignalFile& signals);
  JobStart take_start(const nlohmann::json& start);
  void regroup(SignalFile& signals);
  bool follow(const Endpoint& place, SignalFile& signals);
  bool find_job_again(SignalFile& signals);
  bool follow_one_of(
      std::vector<Endpoint> places, std::chrono::milliseconds patience,
      SignalFile& signals);
  bool lead_by(Call& call);
  void look_for_first();

  const LaunchOptions* options_ = nullptr;
  authentication::Token token_;
  std::unique_ptr<HostListener> listener_;
  Endpoint master_;  // as the command line has it, in numbers
  bool coordinates_ = true;
  std::vector<Peer> peers_;
  std::vector<Peer> waiting_;  // hosts that have come and are in no generation
  std::optional<int> exit_code_of_job_;
  int exit_code_ = 0;

  // The generation, and those before.
  std::string job_;
  int generation_ = -1;  // none yet
  int newest_ = -1;      // that another host has heard of
  int node_ = 0;
  int world_size_ = 0;
  std::vector<Member> members_;  // by node
  std::string member_lines_;     // these, as messages to other hosts
  bool may_restart_ = false;
  std::string layout_;
  std::set<int> without_layout_;  // numbers of ranks
  std::set<int> without_gain_;    // those that the user was told of
  std::chrono::duration<double> change_{1};
  TimePoint began_{};
  std::string name_;  // "node 1, 10.0.0.2"; empty when alone
  bool said_failed_ = false;
  bool said_stopped_ = false;
  bool leaves_ = false;
  int64_t stalled_ = -1;
  // On the coordinator: the nodes that failed, in order, and how each ended.
  std::vector<int> failed_order_;
  std::vector<std::optional<Outcome>> outcomes_;
  std::optional<Outcome> end_;

  // Between two generations.
  bool regrouping_ = false;
  bool has_quorum_ = false;        // regrouping has found one
  bool spare_ = false;             // the job runs without this host
  std::vector<Member> known_;      // hosts of that job, or of the next start
  std::optional<Endpoint> other_;  // who may lead this one instead
  std::string start_;              // the coordinator's message (JSON)
  std::string refused_;

  TimePoint heartbeat_{};  // when the others were told last that this one lives
  TimePoint served_{};     // when serve() was called last
  std::optional<Call> first_call_;  // to the master's address
  TimePoint first_called_{};
};

}  // namespace echelon::launch
