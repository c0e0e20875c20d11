// How the hosts of a job find each other when their coordinator is lost.
//
// When the coordinator is lost, or it has lost too many others (have_quorum()),
// each host regroups: it calls the others of the generation. One that has a
// coordinator sends the caller there. Of two that regroup, the one with the
// higher number follows the other. A host that no lower one answers, and that
// has a quorum, coordinates the next generation. One without a quorum has ended
// its ranks, and calls until the others answer again: two halves of a job never
// both go on. A host whose port refuses a connection has no launcher any more,
// so that it has no vote.
//
// The hosts with the lowest numbers are called first, and in each round twice
// as many as before it. A host that is taken calls no others, so that all hosts
// together make a few calls each, and not the square of their number.
//
// When the first host is started again, its launcher waits at the master's
// address for hosts that do not come there. So the coordinator calls it, and
// sends it to itself.
#include <poll.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "echelon/launch/hosts.h"
#include "echelon/text/format.h"

namespace echelon::launch {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

// How long hosts of a lost coordinator are waited for.
constexpr milliseconds kSettleHosts{1500};
constexpr milliseconds kCallAgain{300};
constexpr milliseconds kCallFirst{1000};
constexpr size_t kCalledFirst = 4;  // hosts

// Where the answer to a call says that the coordinator listens.
std::optional<Endpoint> sent_to(const Call& call) {
  try {
    const json place = json::parse(call.answer()).at("go_to");
    return Endpoint{place.at(0), place.at(1)};
  } catch (const json::exception&) {
    return std::nullopt;
  }
}

}  // namespace

// Becomes a host that `place` coordinates.
bool Hosts::follow(const Endpoint& place) {
  const Deadline deadline(kSettleHosts);
  do {
    if (ask(place)) return true;
    poll(nullptr, 0, 100);
  } while (!deadline.passed());
  return false;
}

// One call. False when the other does not take this host; it may have said who
// does.
bool Hosts::ask(const Endpoint& place) {
  Call call(place, token_.key, hello().dump());
  Call::State state = call.advance();
  while (state == Call::State::open) {
    pollfd file{call.fd(), call.events(), 0};
    poll(&file, 1, 50);
    state = call.advance();
  }
  if (state != Call::State::answered) return false;
  if (lead_by(call)) return true;
  other_ = sent_to(call);
  return false;
}

// A spare that has lost the coordinator asks the other hosts, of which one will
// coordinate.
bool Hosts::find_job_again(SignalFile& signals) {
  const Deadline deadline(options_->join_timeout);
  while (!deadline.passed()) {
    for (const Member& member : std::vector<Member>(known_)) {
      if (ask(member.place)) return true;
      if (other_ && ask(*std::exchange(other_, std::nullopt))) return true;
      other_.reset();
    }
    if (!wait(signals, 100)) return false;
  }
  return false;
}

// Takes the other end of an answered call for the coordinator, if it is one or
// will be one.
bool Hosts::lead_by(Call& call) {
  const json answer = json::parse(call.answer(), nullptr, false);
  if (!answer.is_object() || !answer.contains("waiting")) return false;
  Peer coordinator;
  coordinator.link = call.take_link();
  coordinator.place = call.place();
  peers_.clear();
  peers_.push_back(std::move(coordinator));
  for (Peer& peer : waiting_) {
    peer.link.say({{"go_to", {call.place().address, call.place().port}}});
  }
  waiting_.clear();
  coordinates_ = false;
  regrouping_ = false;
  start_.clear();
  note_waiting(answer);
  return true;
}

void Hosts::regroup(SignalFile& signals) {
  struct Other {
    int node;
    Endpoint home;   // where its launcher listens
    Endpoint place;  // where it said that a coordinator listens, or home
    std::optional<Call> call{};
    TimePoint next{};
    bool silent = false;  // it has not taken a call
    bool dead = false;    // its host says that no launcher is there
  };
  const bool coordinated = std::exchange(coordinates_, false);
  regrouping_ = true;
  // Those that are still connected wait for this host's word.
  if (coordinated) {
    for (Peer& peer : peers_) {
      if (peer.link.is_open()) waiting_.push_back(std::move(peer));
    }
  }
  peers_.clear();
  std::vector<Other> others;
  const auto began = steady_clock::now();
  int round = 0;
  for (int node = 0; node < num_hosts(); ++node) {
    if (node == node_) continue;
    if (others.size() == kCalledFirst << round) ++round;
    const Endpoint& place = members_[static_cast<size_t>(node)].place;
    others.push_back(
        {.node = node,
         .home = place,
         .place = place,
         .next = began + round * kCallAgain});
  }
  tell_user("this host looks for the others of the job");
  const Deadline deadline(options_->join_timeout);
  const Deadline settled(kSettleHosts);
  Notice notice;
  while (!deadline.passed()) {
    if (!wait(signals, 20)) return;
    int dead = 0;
    bool lowest = true;
    for (Other& other : others) {
      if (!other.call && steady_clock::now() >= other.next) {
        other.call.emplace(other.place, token_.key, hello().dump());
      }
      if (other.call) {
        const auto state = other.call->advance();
        if (state != Call::State::open) {
          const Endpoint called = std::exchange(other.place, other.home);
          if (called == other.home) {
            other.silent = state != Call::State::answered;
            other.dead = state == Call::State::refused;
          }
          other.next = steady_clock::now() + kCallAgain;
          if (state == Call::State::answered) {
            if (lead_by(*other.call)) return;
            const auto place = sent_to(*other.call);
            if (place && *place != listener_->place()) {
              other.place = *place;
              other.next = {};
            }
          }
          other.call.reset();
        }
      }
      dead += other.dead ? 1 : 0;
      lowest = lowest && (other.node > node_ || other.silent);
    }
    const int together = present();
    if (lowest && have_quorum(together, num_hosts(), dead, coordinated) &&
        (together + dead == num_hosts() || settled.passed())) {
      regrouping_ = false;
      coordinates_ = has_quorum_ = true;
      const auto newcomers = std::ranges::stable_partition(
          waiting_, [](const Peer& peer) { return peer.node >= 0; });
      peers_.assign(
          std::move_iterator(waiting_.begin()),
          std::move_iterator(newcomers.begin()));
      waiting_.erase(waiting_.begin(), newcomers.begin());
      return;
    }
    notice.show(format(
        "other hosts of the job: {} of {} are here, which may not go on alone",
        together, num_hosts()));
  }
  tell_user(format(
      "after {} this host has found {} of the job's {} hosts, too few to go on",
      deadline.seconds(), present(), num_hosts()));
  exit_code_ = static_cast<int>(ExitCode::failure);
}

// A first host that was started again waits at the master's address.
void Hosts::look_for_first() {
  if (!coordinates_ || generation_ < 0 || listener_->place() == master_) return;
  if (first_call_) {
    if (first_call_->advance() != Call::State::open) first_call_.reset();
    return;
  }
  const auto now = steady_clock::now();
  if (now - first_called_ < kCallFirst ||
      std::ranges::any_of(members_, [&](const Member& member) {
        return member.place == master_;
      })) {
    return;
  }
  first_called_ = now;
  const Endpoint& own = listener_->place();
  first_call_.emplace(
      master_, token_.key,
      json{{"coordinator", {own.address, own.port}}}.dump());
}

}  // namespace echelon::launch
