// A star around node 0: the other nodes tell only node 0, which passes failures
// and stop signals on to the rest. Each host says its outcome once. When node 0
// has all of them, with an error in place of a lost host's, it combines them in
// the order in which hosts began to fail and tells the end to all. A host that
// loses node 0 ends its ranks.
#include "echelon/launch/hosts.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <utility>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::launch {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(
    Cause, rank, exit_code, ending, text, log, host, consequence)

namespace {

using nlohmann::json;

constexpr size_t kMaxLine = 64 << 10;

std::string to_line(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
}

json to_json(const Outcome& outcome) {
  json value = {
      {"exit_code", outcome.exit_code}, {"stopped_by", outcome.stopped_by}};
  if (outcome.cause) value["cause"] = *outcome.cause;
  return value;
}

Outcome outcome_from(const json& value) {
  Outcome outcome{value.at("exit_code"), value.at("stopped_by"), {}};
  if (value.contains("cause")) outcome.cause = value["cause"].get<Cause>();
  return outcome;
}

Outcome lost(int node, const std::string& address) {
  Cause cause;
  cause.text = format(
      "the launcher of node {} ({}) is gone: it was killed, or its host or the "
      "network failed",
      node, address);
  return {static_cast<int>(ExitCode::failure), 0, cause};
}

}  // namespace

Hosts Hosts::meet(const LaunchOptions& options, JobStart& start) {
  Hosts hosts(options);
  const auto token = authentication::read_token(options.token_file);
  if (token.made) {
    std::fprintf(
        stderr,
        "echelon: made %s, your token; hosts that do not share it need a copy, "
        "with mode 0600\n",
        token.source.c_str());
  }
  Rendezvous rendezvous = options.node_rank == 0
                              ? host_rendezvous(options, token)
                              : join_rendezvous(options, token);
  start = std::move(rendezvous.start);
  hosts.peers_ = std::move(rendezvous.links);
  hosts.name_ =
      format("node {}, {}", options.node_rank, start.place.node_address);
  hosts.outcomes_.resize(options.num_nodes);
  return hosts;
}

std::vector<int> Hosts::files() const {
  std::vector<int> files;
  for (const HostLink& peer : peers_) files.push_back(peer.socket.fd());
  return files;
}

std::vector<HostEvent> Hosts::read(size_t index) {
  HostLink& peer = peers_[index];
  std::vector<HostEvent> events;
  char bytes[4096];
  const ssize_t size =
      recv(peer.socket.fd(), bytes, sizeof bytes, MSG_DONTWAIT);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return events;
  if (size > 0) peer.unread.append(bytes, size);
  for (size_t end; (end = peer.unread.find('\n')) != std::string::npos;) {
    const std::string line = peer.unread.substr(0, end);
    peer.unread.erase(0, end + 1);
    take(peer, line, events);
  }
  if (size <= 0 || peer.unread.size() > kMaxLine) lose(peer, events);
  return events;
}

void Hosts::take(
    const HostLink& peer, const std::string& line,
    std::vector<HostEvent>& events) {
  const json value = json::parse(line, nullptr, false);
  if (!value.is_object()) return;
  try {
    if (value.contains("failed")) {
      note_failed(peer.node);
      tell(to_line(value), peer.node);
      events.push_back({HostEvent::failed});
    } else if (value.contains("stopped")) {
      tell(to_line(value), peer.node);
      said_stopped_ = true;
      events.push_back({HostEvent::stopped, value.at("stopped")});
    } else if (value.contains("outcome")) {
      note_outcome(peer.node, outcome_from(value["outcome"]));
    } else if (value.contains("end") && !end_) {
      end_ = outcome_from(value["end"]);
    }
  } catch (const json::exception&) {
    // A line of another version is ignored.
  }
}

void Hosts::lose(HostLink& peer, std::vector<HostEvent>& events) {
  peer.socket.close();
  if (end_) return;
  if (node_rank_ != 0) {
    end_ = lost(peer.node, peer.address);
    events.push_back({HostEvent::failed});
  } else if (!outcomes_[peer.node]) {
    note_failed(peer.node);
    tell(to_line({{"failed", true}}), peer.node);
    events.push_back({HostEvent::failed});
    note_outcome(peer.node, lost(peer.node, peer.address));
  }
}

void Hosts::say_failed() {
  if (!std::exchange(said_failed_, true)) {
    note_failed(node_rank_);
    tell(to_line({{"failed", true}}));
  }
}

void Hosts::say_stopped(int signal) {
  if (!std::exchange(said_stopped_, true)) tell(to_line({{"stopped", signal}}));
}

void Hosts::say_outcome(Outcome outcome) {
  if (outcome.cause) outcome.cause->host = name_;
  if (node_rank_ == 0) {
    note_outcome(0, std::move(outcome));
  } else {
    tell(to_line({{"outcome", to_json(outcome)}}));
  }
}

void Hosts::give_up() {
  for (const HostLink& peer : peers_) {
    if (node_rank_ != 0 && !end_) {
      end_ = lost(peer.node, peer.address);
    } else if (node_rank_ == 0 && !outcomes_[peer.node]) {
      note_outcome(peer.node, lost(peer.node, peer.address));
    }
  }
}

void Hosts::note_failed(int node) {
  if (std::find(failed_order_.begin(), failed_order_.end(), node) ==
      failed_order_.end()) {
    failed_order_.push_back(node);
  }
}

void Hosts::note_outcome(int node, Outcome outcome) {
  if (alone()) {
    end_ = std::move(outcome);
    return;
  }
  outcomes_[node] = std::move(outcome);
  if (std::ranges::any_of(
          outcomes_, [](const auto& one) { return !one.has_value(); })) {
    return;
  }
  for (int i = 0; i < num_nodes_; ++i) {
    note_failed(i);  // nodes that did not fail come last
  }
  std::vector<Outcome> ordered;
  for (const int i : failed_order_) ordered.push_back(*outcomes_[i]);
  end_ = combine(ordered);
  tell(to_line({{"end", to_json(*end_)}}));
}

void Hosts::tell(const std::string& line, int except_node) {
  for (const HostLink& peer : peers_) {
    if (peer.socket.is_open() && peer.node != except_node) {
      // Lines are short and few, so the socket's buffer takes all of a line.
      (void)!send(peer.socket.fd(), line.data(), line.size(), MSG_NOSIGNAL);
    }
  }
}

}  // namespace echelon::launch
