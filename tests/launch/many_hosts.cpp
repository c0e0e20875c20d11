// The launchers of many hosts in one process: each is a thread that does what a
// host's launcher does to come to a job, stay in it and leave it, over real
// connections of loopback. There are no ranks.
//
//   many_hosts HOSTS [RANKS] [SECONDS]
//
// Prints a line of JSON for each phase of the job: how long it took, the
// messages and bytes that all launchers sent in it, how often they called each
// other, and the processor time of the one that coordinates.
//
//   join        from the first connection until all have their place
//   idle        SECONDS (2) in which nothing happens
//   signal      a host asks for a checkpoint on all hosts
//   failure     from a failure on one host until all know how the job ended
//   restart     until all are in the next generation
//   lost        from the end of node 0 until the others are in a generation
//               without it
//   silent      the same for a quarter of the hosts, those with the lowest
//               numbers, whose launchers say nothing any more
//   end         until the others have left
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "echelon/error.h"
#include "echelon/launch/host_link.h"
#include "echelon/launch/hosts.h"
#include "tests/support/process.h"

namespace {

using namespace echelon;
using namespace echelon::launch;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

enum Stage { idle, signalling, failing };

double seconds_of_thread() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) +
         static_cast<double>(time.tv_nsec) / 1e9;
}

class ManyHosts {
 public:
  ManyHosts(int hosts, int ranks, std::string token, milliseconds rest)
      : hosts_(hosts),
        ranks_(ranks),
        token_(std::move(token)),
        rest_(rest),
        together_(hosts, EndPhase{this}) {}

  void run() {
    port_ = testing_support::free_port();
    began_ = steady_clock::now();
    std::vector<std::thread> threads;
    for (int node = 0; node < hosts_; ++node) {
      threads.emplace_back([this, node] {
        try {
          live(node);
        } catch (const Error& error) {
          std::fprintf(stderr, "node %d: %s\n", node, error.what());
          std::_Exit(1);
        }
      });
    }
    for (auto& thread : threads) thread.join();
  }

 private:
  struct EndPhase {
    ManyHosts* all;
    void operator()() noexcept { all->end_phase(); }
  };

  void live(int node) {
    LaunchOptions options;
    options.num_ranks = ranks_;
    options.num_nodes = hosts_;
    options.least_nodes = hosts_ - 1;
    options.node_rank = node;
    options.master_addr = "127.0.0.1";
    options.master_port = port_;
    options.token_file = token_;
    options.max_restarts = 3;
    Hosts hosts = Hosts::meet(options);
    auto start = hosts.next(/*may_restart=*/true, signals_);
    check(
        start && start->num_nodes == hosts_ &&
        start->world_size == hosts_ * ranks_);
    meet("join", node);
    if (node == 0) {
      const auto until = steady_clock::now() + rest_;
      while (steady_clock::now() < until) turn(hosts);
      stage_ = signalling;
    } else {
      while (stage_ == idle) turn(hosts);
    }
    meet("idle", node);
    if (node == hosts_ - 1) hosts.say_signal(SIGUSR1);
    while (node != hosts_ - 1 && signalled_ < hosts_ - 1) turn(hosts);
    meet("signal", node);
    bool fails = node == hosts_ / 2;
    if (fails) fail(hosts, "it failed");
    while (!hosts.end()) {
      if (!turn(hosts) || std::exchange(fails, true)) continue;
      fail(hosts, "");
    }
    check(hosts.end()->cause && hosts.end()->cause->text == "it failed");
    meet("failure", node);
    start = hosts.next(/*may_restart=*/true, signals_);
    check(start && start->place.generation == 1);
    meet("restart", node);
    // As node 0's launcher is killed: its connections close, and its port
    // refuses others.
    if (node == 0) {
      hosts = Hosts();
    } else {
      while (!hosts.end()) turn(hosts);
      start = hosts.next(/*may_restart=*/true, signals_);
      check(
          start && start->num_nodes == hosts_ - 1 &&
          hosts.coordinates() == (node == 1));
    }
    meet("lost", node, 1);
    const int silent = std::max(1, hosts_ / 4);
    const int first = 1 + silent;
    options.least_nodes = hosts_ - first;
    if (node >= first) {
      while (!hosts.end()) turn(hosts);
      start = hosts.next(/*may_restart=*/true, signals_);
      check(
          start && start->num_nodes == hosts_ - first &&
          hosts.coordinates() == (node == first));
    }
    meet("silent", node, first);
    if (node == first) hosts.finish(0);
    if (node > first) {
      check(!hosts.next(/*may_restart=*/true, signals_));
      check(hosts.exit_code() == 0);
    }
    meet("end", node, first);
  }

  // As a launcher that has heard of a failure: it ends its ranks, and says how
  // they ended.
  void fail(Hosts& hosts, const std::string& why) {
    hosts.say_failed();
    Outcome outcome;
    if (!why.empty()) {
      outcome.exit_code = 1;
      outcome.cause = Cause{.rank = 0, .ending = "exit code 1", .text = why};
    }
    hosts.say_outcome(outcome);
  }

  /// One turn of a launcher's loop. Whether the job fails.
  bool turn(Hosts& hosts) {
    std::vector<pollfd> files;
    hosts.add_files(files);
    const auto left = std::chrono::ceil<milliseconds>(
        *hosts.deadline() - steady_clock::now());
    poll(
        files.data(), files.size(),
        static_cast<int>(std::max<int64_t>(0, left.count())));
    bool failed = false;
    for (const HostEvent& event : hosts.serve(files.data())) {
      failed = failed || event.kind == HostEvent::failed;
      if (event.kind == HostEvent::signal) ++signalled_;
    }
    return failed;
  }

  void meet(const char* phase, int node, int coordinator = 0) {
    thread_local double before = 0;
    const double now = seconds_of_thread();
    if (node == coordinator) {
      phase_ = phase;
      coordinator_seconds_ = now - before;
    }
    before = now;
    together_.arrive_and_wait();
  }

  void end_phase() {
    const auto now = steady_clock::now();
    const LinkTraffic sent = link_traffic();
    std::printf(
        "{\"hosts\":%d,\"ranks\":%d,\"phase\":\"%s\",\"seconds\":%.3f,"
        "\"messages\":%llu,\"bytes\":%llu,\"calls\":%llu,"
        "\"coordinator_cpu_seconds\":%.3f}\n",
        hosts_, hosts_ * ranks_, phase_,
        std::chrono::duration<double>(now - began_).count(),
        static_cast<unsigned long long>(sent.messages - sent_.messages),
        static_cast<unsigned long long>(sent.bytes - sent_.bytes),
        static_cast<unsigned long long>(sent.calls - sent_.calls),
        coordinator_seconds_);
    std::fflush(stdout);
    sent_ = link_traffic();
    began_ = steady_clock::now();
  }

  static void check(bool holds) {
    if (holds) return;
    std::fprintf(stderr, "the job is not as it should be\n");
    std::_Exit(1);
  }

  const int hosts_, ranks_;
  const std::string token_;
  const milliseconds rest_;
  int port_ = 0;
  SignalFile signals_;
  std::atomic<Stage> stage_ = idle;
  std::atomic<int> signalled_ = 0;
  std::barrier<EndPhase> together_;
  steady_clock::time_point began_;
  LinkTraffic sent_;
  const char* phase_ = "";
  double coordinator_seconds_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const int hosts = argc > 1 ? std::max(4, std::atoi(argv[1])) : 64;
  const int ranks = argc > 2 ? std::atoi(argv[2]) : 8;
  const int rest = argc > 3 ? std::atoi(argv[3]) : 2;
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  const testing_support::TempFolder folder;
  const std::string token = folder.path() + "/token";
  std::ofstream(token) << std::string(64, 'a') << "\n";
  chmod(token.c_str(), 0600);
  ManyHosts(hosts, ranks, token, std::chrono::seconds(rest)).run();
}
