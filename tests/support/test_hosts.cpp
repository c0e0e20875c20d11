#include "tests/support/test_hosts.h"

#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <random>
#include <sstream>
#include <stdexcept>

#include "tests/support/process.h"

namespace echelon::testing_support {
namespace {

bool succeeds(const std::vector<std::string>& words) {
  return Command(words).wait() == 0;
}

void must(const std::vector<std::string>& words) {
  Command command(words);
  if (command.wait() != 0) {
    throw std::runtime_error(words[0] + " " + words[1] + ": " + command.err());
  }
}

// An interface of a namespace whose packets this process reads and writes. -1:
// the system has none.
int open_tap(const std::string& space, const std::string& name) {
  const int entered = open(("/run/netns/" + space).c_str(), O_RDONLY);
  if (entered < 0 || setns(entered, CLONE_NEWNET) != 0) return -1;
  close(entered);
  const int tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
  ifreq request{};
  request.ifr_flags = IFF_TAP | IFF_NO_PI;
  std::strncpy(request.ifr_name, name.c_str(), IFNAMSIZ - 1);
  return tap >= 0 && ioctl(tap, TUNSETIFF, &request) == 0 ? tap : -1;
}

// Passes packets on between two interfaces, late, or not at all.
[[noreturn]] void
pass_on(int a, int b, std::chrono::milliseconds delay, double loss) {
  using Clock = std::chrono::steady_clock;
  struct Packet {
    Clock::time_point due;
    std::string bytes;
  };
  std::deque<Packet> waiting[2];
  const int ends[2] = {a, b};
  std::mt19937 random(1);
  std::bernoulli_distribution is_lost(loss);
  for (;;) {
    const bool idle = waiting[0].empty() && waiting[1].empty();
    pollfd files[2] = {{a, POLLIN, 0}, {b, POLLIN, 0}};
    poll(files, 2, idle ? -1 : 1);
    for (int i = 0; i < 2; ++i) {
      char bytes[2048];
      ssize_t size = 0;
      while ((size = read(ends[i], bytes, sizeof bytes)) > 0) {
        if (is_lost(random)) continue;
        waiting[i].push_back(
            {Clock::now() + delay,
             std::string(bytes, static_cast<size_t>(size))});
      }
      while (!waiting[i].empty() && waiting[i].front().due <= Clock::now()) {
        const std::string& packet = waiting[i].front().bytes;
        (void)!write(ends[1 - i], packet.data(), packet.size());
        waiting[i].pop_front();
      }
    }
  }
}

}  // namespace

TestHosts::TestHosts(int number)
    : id_(std::to_string(getpid())), reason_(make(number)) {}

TestHosts::~TestHosts() {
  for (const pid_t pid : cables_) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
  for (const auto& name : names_) succeeds({"ip", "netns", "del", name});
  if (!switch_.empty()) succeeds({"ip", "netns", "del", switch_});
}

// The end of a host's cable at the switch; the other end has an e after it.
std::string TestHosts::cable(int host) const {
  return "ech" + id_.substr(id_.size() > 6 ? id_.size() - 6 : 0) +
         std::to_string(host);
}

std::string TestHosts::make(int number) {
  if (geteuid() != 0) {
    return "needs root: network namespaces are made";
  }
  if (!succeeds({"ip", "-V"})) {
    return "needs the program ip (Debian package iproute2)";
  }
  const std::string name = "echelon-" + id_;
  if (!succeeds({"ip", "netns", "add", name + "-s"})) {
    return "this system allows no network namespaces";
  }
  switch_ = name + "-s";
  if (!succeeds(
          {"ip", "-n", switch_, "link", "add", "switch", "type", "bridge"})) {
    return "this system has no bridge devices";
  }
  must({"ip", "-n", switch_, "link", "set", "switch", "up"});
  for (int i = 0; i < number; ++i) {
    const std::string host = name + "-" + std::to_string(i);
    must({"ip", "netns", "add", host});
    names_.push_back(host);
    if (!succeeds(
            {"ip", "link", "add", cable(i), "type", "veth", "peer", "name",
             cable(i) + "e"})) {
      return "this system has no veth devices";
    }
    must({"ip", "link", "set", cable(i), "netns", switch_});
    must({"ip", "-n", switch_, "link", "set", cable(i), "master", "switch"});
    must({"ip", "-n", switch_, "link", "set", cable(i), "up"});
    must({"ip", "link", "set", cable(i) + "e", "netns", host});
    must(
        {"ip", "-n", host, "addr", "add", address(i) + "/24", "dev",
         cable(i) + "e"});
    must({"ip", "-n", host, "link", "set", cable(i) + "e", "up"});
    must({"ip", "-n", host, "link", "set", "lo", "up"});
  }
  return "";
}

std::string TestHosts::worsen(int host, int delay_ms, double loss) {
  const std::string tap = cable(host);
  const std::string& space = names_[static_cast<size_t>(host)];
  must({"ip", "-n", switch_, "link", "del", tap});
  int ready[2];
  if (pipe(ready) != 0) return "no pipe";
  const pid_t pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int a = open_tap(space, tap + "e");
    const int b = open_tap(switch_, tap);
    const char answer = a >= 0 && b >= 0 ? '+' : '-';
    (void)!write(ready[1], &answer, 1);
    close(ready[1]);
    if (answer == '-') _exit(1);
    pass_on(a, b, std::chrono::milliseconds(delay_ms), loss);
  }
  cables_.push_back(pid);
  close(ready[1]);
  char answer = '-';
  (void)!read(ready[0], &answer, 1);
  close(ready[0]);
  if (answer != '+') return "this system has no tap devices";
  must({"ip", "-n", switch_, "link", "set", tap, "master", "switch"});
  must({"ip", "-n", switch_, "link", "set", tap, "up"});
  must(
      {"ip", "-n", space, "addr", "add", address(host) + "/24", "dev",
       tap + "e"});
  must({"ip", "-n", space, "link", "set", tap + "e", "up"});
  return "";
}

std::string TestHosts::address(int host) {
  return "10.83.0." + std::to_string(host + 1);
}

std::vector<std::string>
TestHosts::on(int host, const std::vector<std::string>& words) const {
  // A host name of its own: programs tell hosts apart by it.
  std::vector<std::string> all = {
      "ip",
      "netns",
      "exec",
      names_[host],
      "unshare",
      "--uts",
      "sh",
      "-c",
      "hostname host" + std::to_string(host) + "; exec \"$@\"",
      "sh"};
  all.insert(all.end(), words.begin(), words.end());
  return all;
}

void TestHosts::cut(int host) const {
  must({"ip", "-n", switch_, "link", "set", cable(host), "down"});
}

void TestHosts::kill_all(int host) const {
  // Those that have been started meanwhile are found by the next look.
  for (int looks = 0; looks < 100; ++looks) {
    Command list({"ip", "netns", "pids", names_[static_cast<size_t>(host)]});
    list.wait();
    std::istringstream pids(list.out());
    bool found = false;
    for (pid_t pid = 0; pids >> pid; found = true) kill(pid, SIGKILL);
    if (!found) return;
    usleep(10000);
  }
}

void TestHosts::mend(int host) const {
  must({"ip", "-n", switch_, "link", "set", cable(host), "up"});
}

}  // namespace echelon::testing_support
