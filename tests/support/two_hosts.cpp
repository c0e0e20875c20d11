#include "tests/support/two_hosts.h"

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

TwoHosts::TwoHosts() : reason_(make()) {}

TwoHosts::~TwoHosts() {
  for (const auto& name : names_) {
    if (!name.empty()) {
      succeeds({"ip", "netns", "del", name});
    }
  }
}

std::string TwoHosts::make() {
  if (geteuid() != 0) {
    return "needs root: network namespaces are made";
  }
  if (!succeeds({"ip", "-V"})) {
    return "needs the program ip (Debian package iproute2)";
  }
  const std::string id = std::to_string(getpid());
  for (int i = 0; i < 2; ++i) {
    const std::string name = "echelon-" + id + "-" + std::to_string(i);
    cables_[i] = "ech" + id.substr(id.size() > 6 ? id.size() - 6 : 0) +
                 (i == 0 ? "a" : "b");
    if (!succeeds({"ip", "netns", "add", name})) {
      return "this system allows no network namespaces";
    }
    names_[i] = name;
  }
  if (!succeeds(
          {"ip", "link", "add", cables_[0], "type", "veth", "peer", "name",
           cables_[1]})) {
    return "this system has no veth devices";
  }
  for (int i = 0; i < 2; ++i) {
    must({"ip", "link", "set", cables_[i], "netns", names_[i]});
    must(
        {"ip", "-n", names_[i], "addr", "add", address(i) + "/24", "dev",
         cables_[i]});
    must({"ip", "-n", names_[i], "link", "set", cables_[i], "up"});
    must({"ip", "-n", names_[i], "link", "set", "lo", "up"});
  }
  return "";
}

std::string TwoHosts::address(int host) {
  return "10.83.0." + std::to_string(host + 1);
}

std::vector<std::string>
TwoHosts::on(int host, const std::vector<std::string>& words) const {
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

void TwoHosts::cut_cable() const {
  must({"ip", "-n", names_[1], "link", "set", cables_[1], "down"});
}

}  // namespace echelon::testing_support
