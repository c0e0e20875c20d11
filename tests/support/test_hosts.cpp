#include "tests/support/test_hosts.h"

#include <unistd.h>

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

}  // namespace

TestHosts::TestHosts(int number)
    : id_(std::to_string(getpid())), reason_(make(number)) {}

TestHosts::~TestHosts() {
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

void TestHosts::mend(int host) const {
  must({"ip", "-n", switch_, "link", "set", cable(host), "up"});
}

}  // namespace echelon::testing_support
