// How a launcher comes to a job of several hosts: node 0 listens at the
// master's address, and the others connect, retrying until the deadline. What
// they say to each other then is in membership.cpp.
#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "echelon/authentication/connect.h"
#include "echelon/authentication/strangers.h"
#include "echelon/error.h"
#include "echelon/launch/hosts.h"
#include "echelon/text/format.h"

namespace echelon::launch {
namespace {

using authentication::address_of;
using authentication::Port;
using authentication::State;
using authentication::Token;
using std::chrono::milliseconds;

constexpr milliseconds kMaxRetries{10000};  // when every connection is closed

// /etc/hosts often maps a host's own name to 127.0.1.1.
void refuse_loopback_name(
    const LaunchOptions& options, const std::string& address) {
  in_addr ignored;
  if (address.starts_with("127.") && options.master_addr != "localhost" &&
      inet_pton(AF_INET, options.master_addr.c_str(), &ignored) != 1) {
    throw ConfigError(format(
        "[launch] --master-addr {} is {} on this host, which no other host "
        "reaches; give the number of its address",
        options.master_addr, address));
  }
}

// In Kubernetes the name of a pod comes seconds after the pod, and its address
// is another one when it was started again.
Addresses find_master(
    const LaunchOptions& options, const Deadline& deadline, Notice& notice) {
  for (;;) {
    std::string reason;
    auto found = find_address(
        options.master_addr, master_port(options), options.name_may_come,
        reason);
    if (found) return found;
    if (deadline.passed()) {
      throw ConfigError(format(
          "[launch] master address \"{}\": {}, for {}; give its number, or "
          "look whether the name is that of the host with --node-rank 0",
          options.master_addr, reason, deadline.seconds()));
    }
    notice.show(format("the name {} ({})", options.master_addr, reason));
    poll(nullptr, 0, deadline.left_ms(milliseconds(200)));
  }
}

// The host that coordinates has a connection to each of the others. The usual
// soft limit of 1024 is too low for a thousand, and each host may come to
// coordinate.
void allow_connections(const LaunchOptions& options) {
  constexpr rlim_t kOwn = 16, kStrangers = 256;
  const auto others = static_cast<rlim_t>(options.num_nodes);
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  if (limit.rlim_max < others + kOwn) {
    throw ConfigError(format(
        "[launch] --nnodes {}: a launcher needs {} open files, one for each "
        "host, and this one may have {}; raise the hard limit (`ulimit -Hn`, "
        "LimitNOFILE of a service)",
        options.num_nodes, others + kOwn, limit.rlim_max));
  }
  const rlim_t wanted = others + kOwn + kStrangers;
  if (limit.rlim_cur >= wanted) return;
  limit.rlim_cur = std::min(wanted, limit.rlim_max);
  setrlimit(RLIMIT_NOFILE, &limit);
}

FileDescriptor
connect_to_host(const LaunchOptions& options, const Deadline& deadline) {
  const std::string place = master_text(options);
  Notice of_name;
  Notice of_host;
  for (;;) {
    const auto target = find_master(options, deadline, of_name);
    FileDescriptor link = authentication::connect_within(
        *target, milliseconds(deadline.left_ms(milliseconds(2000))));
    const int error = errno;
    if (link.is_open()) return link;
    if (deadline.passed() || error == ENETUNREACH || error == EACCES) {
      throw ConfigError(format(
          "[launch] node 0 does not answer at {}: {}; is the launcher with "
          "--node-rank 0 running there, and the port open between the hosts?",
          place, std::strerror(error)));
    }
    of_host.show(format("node 0 at {} ({})", place, std::strerror(error)));
    poll(nullptr, 0, deadline.left_ms(milliseconds(100)));
  }
}

// A connection to node 0, which has proved the token.
FileDescriptor join(
    const LaunchOptions& options, const Token& token,
    const Deadline& deadline) {
  const std::string place = master_text(options);
  const Deadline retries(std::min(kMaxRetries, options.join_timeout));
  for (;;) {
    FileDescriptor link = connect_to_host(options, deadline);
    switch (authentication::prove(
        link.fd(), token.key, Port::launchers, deadline.end())) {
      case State::proved:
        return link;
      case State::other_program:
        throw ConfigError(format(
            "[launch] what answers at {} is not a launcher of this version; "
            "give another --master-port",
            place));
      case State::other_key:
        throw ConfigError(format(
            "[launch] node 0 at {} ({}) has another token than {}; give this "
            "host the same token, as a file with mode 0600",
            place, address_of(link.fd(), true), token.source));
      case State::open:
        throw ConfigError(format(
            "[launch] what answers at {} did not prove the token within {}; "
            "give another --master-port",
            place, deadline.seconds()));
      case State::closed:
        break;
    }
    if (retries.passed() || deadline.passed()) {
      throw ConfigError(format(
          "[launch] what answers at {} closes each connection: it is not the "
          "launcher of this job, only one of the two hosts has --tls, or too "
          "many others connect there; give another --master-port",
          place));
    }
    poll(nullptr, 0, deadline.left_ms(milliseconds(100)));
  }
}

}  // namespace

Hosts Hosts::meet(const LaunchOptions& options) {
  allow_connections(options);
  Hosts hosts;
  hosts.options_ = &options;
  hosts.token_ = authentication::read_token(options.token_file);
  hosts.token_.key.set_encrypts(options.tls);
  if (hosts.token_.made) {
    std::fprintf(
        stderr,
        "echelon: made %s, your token; hosts that do not share it need a copy, "
        "with mode 0600\n",
        hosts.token_.source.c_str());
  }
  hosts.world_size_ = options.num_ranks * options.num_nodes;
  const auto listen_at = [&](BoundSocket socket) {
    hosts.listener_ = std::make_unique<HostListener>(
        std::move(socket), hosts.token_, options.num_nodes,
        options.join_timeout);
  };
  if (options.node_rank == 0 && !options.joins) {
    Notice notice;
    find_master(options, Deadline(options.join_timeout), notice);
    BoundSocket bound = bind_master(options.master_addr, master_port(options));
    refuse_loopback_name(options, bound.address);
    hosts.master_ = {bound.address, bound.port};
    listen_at(std::move(bound));
    return hosts;
  }
  hosts.coordinates_ = false;
  Peer coordinator;
  coordinator.link = HostLink(
      join(options, hosts.token_, Deadline(options.join_timeout)),
      hosts.token_.key, authentication::Handshake::End::client);
  coordinator.place = {coordinator.link.address(), master_port(options)};
  hosts.master_ = coordinator.place;
  // The master's port, where it is free: then one is enough to open, and known
  // to those who join by way of this host.
  const std::string& own = coordinator.link.own_address();
  try {
    listen_at(bind_master(own, master_port(options)));
  } catch (const ConfigError&) {
    listen_at(bind_master(own, 0));
  }
  coordinator.link.say(hosts.hello());
  hosts.peers_.push_back(std::move(coordinator));
  return hosts;
}

}  // namespace echelon::launch
