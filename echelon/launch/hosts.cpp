// A generation of a job of several hosts: a star around the coordinator. The
// other hosts tell only it, and it passes failures and stop signals on. Each
// host says its outcome once. When the coordinator has all of them, with an
// error in place of a lost host's, it combines them in the order in which hosts
// began to fail and tells the end to all. A host that loses the coordinator
// ends its ranks.
//
// A host is lost when its connection ends, and in a job that may go on without
// it also when nothing has come from it for kLease by the receiver's own clock.
// All say that they live every kHeartbeat.
#include "echelon/launch/hosts.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::launch {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(
    Cause, rank, exit_code, ending, text, log, host, consequence, kind)

namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kHeartbeat{500};
constexpr milliseconds kLease{4000};
constexpr milliseconds kDoubt{1500};
// A coordinator that grows the job too often would only save and start.
constexpr milliseconds kLeastGeneration{2000};

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
  cause.kind = FailureKind::outside;
  cause.text = format(
      "the launcher of node {} ({}) is gone: it was killed, or its host or the "
      "network failed",
      node, address);
  return {static_cast<int>(ExitCode::failure), 0, cause};
}

}  // namespace

bool have_quorum(int present, int members, int dead, bool coordinator) {
  const int living = members - dead;
  return 2 * present > living || (2 * present == living && coordinator);
}

void Hosts::begin_generation() {
  name_ = format(
      "node {}, {}", node_, members_[static_cast<size_t>(node_)].place.address);
  said_failed_ = said_stopped_ = false;
  failed_order_.clear();
  outcomes_.assign(members_.size(), std::nullopt);
  end_.reset();
  stalled_ = -1;
  for (Peer& peer : peers_) peer.stalled = -1;
  began_ = steady_clock::now();
}

void Hosts::add_files(std::vector<pollfd>& files) const {
  if (alone()) return;
  for (const auto* list : {&peers_, &waiting_}) {
    for (const Peer& peer : *list) {
      files.push_back({peer.link.fd(), peer.link.events(), 0});
    }
  }
  if (first_call_) {
    files.push_back({first_call_->fd(), first_call_->events(), 0});
  }
  listener_->add_files(files);
}

std::vector<HostEvent> Hosts::serve(const pollfd* files) {
  std::vector<HostEvent> events;
  if (alone()) return events;
  const size_t num_peers = peers_.size();
  const size_t num_waiting = waiting_.size();
  for (size_t i = 0; i < num_peers; ++i) {
    // A call may have read more than the answer.
    if (files[i].revents != 0 || peers_[i].link.has_message()) {
      read(peers_[i], events);
    }
  }
  for (size_t i = 0; i < num_waiting; ++i) {
    HostLink& link = waiting_[i].link;
    if (files[num_peers + i].revents == 0) continue;
    if (!link.receive()) link.close();
    while (link.take()) {
    }
  }
  std::erase_if(
      waiting_, [](const Peer& peer) { return !peer.link.is_open(); });
  const size_t newcomers = num_peers + num_waiting + (first_call_ ? 1 : 0);
  for (auto& caller : listener_->serve(files + newcomers)) {
    take_caller(std::move(caller));
  }
  pass_time(events);
  return events;
}

void Hosts::pass_time(std::vector<HostEvent>& events) {
  const auto now = steady_clock::now();
  look_for_first();
  // While this launcher was stopped, it could not hear the others.
  if (now - std::exchange(served_, now) > kDoubt) {
    for (Peer& peer : peers_) peer.link.hear_now();
  }
  if (now - heartbeat_ >= kHeartbeat) {
    heartbeat_ = now;
    for (Peer& peer : peers_) {
      peer.link.say({{"heartbeat", 1}, {"stalled", stalled_}});
    }
    if (coordinates_) look_for_hangs(events);
    for (Peer& peer : waiting_) peer.link.say({{"heartbeat", 1}});
  }
  if (!may_restart_) return;
  for (Peer& peer : peers_) {
    if (peer.link.is_open() &&
        now - peer.link.heard() > std::max(kLease, peer.busy)) {
      lose(peer, events);
    }
  }
}

// Ranks of one host wait for those of another that saves, say. So the job hangs
// only when no host's ranks make progress.
void Hosts::look_for_hangs(std::vector<HostEvent>& events) {
  Peer* last = nullptr;
  int64_t least = stalled_;
  for (Peer& peer : peers_) {
    if (peer.stalled < 0) return;
    if (peer.stalled < least) {
      least = peer.stalled;
      last = &peer;
    }
  }
  if (least < 0) return;
  if (last == nullptr) {
    events.push_back({HostEvent::hangs});
  } else {
    last->link.say({{"hangs", true}});
  }
}

std::optional<TimePoint> Hosts::deadline() const {
  if (alone()) return std::nullopt;
  return heartbeat_ + kHeartbeat;
}

bool Hosts::doubtful() const {
  const auto now = steady_clock::now();
  return std::ranges::any_of(peers_, [&](const Peer& peer) {
    return now - peer.link.heard() > kDoubt;
  });
}

bool Hosts::wants_change() {
  if (alone() || !coordinates_ ||
      steady_clock::now() - began_ < kLeastGeneration) {
    return false;
  }
  if (leaves_ || std::ranges::any_of(
                     peers_, [](const Peer& peer) { return peer.leaves; })) {
    return true;
  }
  return may_restart_ && newcomers(change_.count()) > 0;
}

void Hosts::read(Peer& peer, std::vector<HostEvent>& events) {
  const bool open = peer.link.receive();
  while (const auto message = peer.link.take()) {
    if (message->is_object()) take(peer, *message, events);
  }
  if (!open) lose(peer, events);
}

void Hosts::take(
    Peer& peer, const json& message, std::vector<HostEvent>& events) {
  try {
    peer.busy = milliseconds(message.value("busy", 0));
    if (message.contains("heartbeat")) {
      peer.stalled = message.value("stalled", int64_t{-1});
    }
    if (message.contains("failed")) {
      note_failed(peer.node);
      pass_on_failure(peer.node);
      events.push_back({HostEvent::failed});
    } else if (message.contains("stopped")) {
      if (!std::exchange(said_stopped_, true)) tell(message, peer.node);
      events.push_back({HostEvent::stopped, message.at("stopped")});
    } else if (message.contains("changes")) {
      events.push_back({HostEvent::changes});
    } else if (message.contains("signal")) {
      tell(message, peer.node);
      events.push_back({HostEvent::signal, message.at("signal")});
    } else if (message.contains("hangs")) {
      events.push_back({HostEvent::hangs});
    } else if (message.contains("leaves")) {
      peer.leaves = true;
    } else if (message.contains("outcome")) {
      if (peer.node >= 0) {
        note_outcome(peer.node, outcome_from(message["outcome"]));
      }
    } else if (message.contains("end") && !end_) {
      end_ = outcome_from(message["end"]);
    } else if (message.contains("start")) {
      start_ = message["start"].dump();
    } else if (message.contains("over")) {
      exit_code_of_job_ = message["over"].get<int>();
    } else if (message.contains("refused")) {
      refused_ = message["refused"].dump();
    } else if (message.contains("members")) {
      note_members(message);
    } else if (message.contains("waiting")) {
      note_waiting(message);
    } else if (message.contains("go_to")) {
      const json& place = message["go_to"];
      other_ = Endpoint{place.at(0), place.at(1)};
    }
  } catch (const json::exception&) {
    // A message of another version is ignored.
  }
}

void Hosts::lose(Peer& peer, std::vector<HostEvent>& events) {
  peer.link.close();
  if (generation_ < 0 || peer.node < 0) return;
  if (end_) return;
  if (!coordinates_) {
    end_ = lost(peer.node, peer.link.address());
    events.push_back({HostEvent::failed});
  } else if (!outcomes_[peer.node]) {
    note_failed(peer.node);
    pass_on_failure(peer.node);
    events.push_back({HostEvent::failed});
    note_outcome(peer.node, lost(peer.node, peer.link.address()));
  }
}

void Hosts::say_busy(milliseconds at_most) {
  if (!alone()) tell({{"busy", at_most.count()}});
}

void Hosts::say_failed() {
  if (alone()) return;
  note_failed(node_);
  if (!std::exchange(said_failed_, true)) tell({{"failed", true}});
}

// Each host that hears of a failure says that it fails too, and to a host a
// second failure says nothing new: all of them to all would be the square of
// their number.
void Hosts::pass_on_failure(int node) {
  if (coordinates_ && !std::exchange(said_failed_, true)) {
    tell({{"failed", true}}, node);
  }
}

void Hosts::say_stopped(int signal) {
  if (!std::exchange(said_stopped_, true)) tell({{"stopped", signal}});
}

void Hosts::say_changes() {
  tell({{"changes", true}});
}

void Hosts::say_signal(int signal) {
  if (!alone()) tell({{"signal", signal}});
}

std::string Hosts::leave() {
  const int least = options_->least_nodes;
  if (least == 0 || num_hosts() <= least) {
    return format(
        "the job has {} and goes on with {} at least (--nnodes MIN:MAX)",
        counted(num_hosts(), "host"), least > 0 ? least : options_->num_nodes);
  }
  leaves_ = true;
  if (!coordinates_) tell({{"leaves", true}});
  return "";
}

void Hosts::say_outcome(Outcome outcome) {
  if (outcome.cause) outcome.cause->host = name_;
  if (coordinates_) {
    note_outcome(node_, std::move(outcome));
  } else {
    tell({{"outcome", to_json(outcome)}});
  }
}

void Hosts::give_up() {
  for (const Peer& peer : peers_) {
    if (!coordinates_ && !end_) {
      end_ = lost(peer.node, peer.link.address());
    } else if (coordinates_ && !outcomes_[peer.node]) {
      note_outcome(peer.node, lost(peer.node, peer.link.address()));
    }
  }
}

void Hosts::note_failed(int node) {
  if (std::ranges::find(failed_order_, node) == failed_order_.end()) {
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
  for (int i = 0; i < num_hosts(); ++i) {
    note_failed(i);  // nodes that did not fail come last
  }
  std::vector<Outcome> ordered;
  for (const int i : failed_order_) ordered.push_back(*outcomes_[i]);
  end_ = combine(ordered);
  tell({{"end", to_json(*end_)}});
}

void Hosts::tell(const json& message, int except_node) {
  for (Peer& peer : peers_) {
    if (peer.node != except_node) peer.link.say(message);
  }
}

void Hosts::finish(int exit_code) {
  if (alone()) return;
  tell({{"over", exit_code}});
  for (Peer& peer : waiting_) peer.link.say({{"over", exit_code}});
}

}  // namespace echelon::launch
