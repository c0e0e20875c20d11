// How the hosts of a job find each other when their coordinator is lost.
//
// When the coordinator is lost, or it has lost too many others (have_quorum()),
// each host regroups: it calls hosts with lower numbers. One that has a
// coordinator sends the caller there. Of two that regroup, the one with the
// higher number follows the other. A host that no lower one answers gathers
// those that call, and then calls the others too. When it has a quorum, it
// coordinates the next generation. One without a quorum has ended its ranks,
// and calls until the others answer again: two halves of a job never both go
// on. A host whose port refuses a connection has no launcher any more, so that
// it has no vote.
//
// A host calls the first few hosts, of which one usually lives, and then those
// below itself, downwards. So it makes a few calls more than there are lost
// hosts next below it, and all hosts together a few each, not the square of
// their number. A host whose leader comes to follow another one is sent there.
// When the hosts form a chain, each step halves it.
//
// When the first host is started again, its launcher waits at the master's
// address for hosts that do not come there. So the coordinator calls it, and
// sends it to itself.
#include <poll.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <utility>

#include "echelon/launch/hosts.h"
#include "echelon/text/format.h"

namespace echelon::launch {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

// How long hosts of a lost coordinator are waited for, from the last that came,
// and when those that have not come are called.
constexpr milliseconds kSettleHosts{1500};
constexpr milliseconds kCallOthers{300};
constexpr milliseconds kCallAgain{300};
constexpr int kMostDoublings = 3;  // of the time between two rounds of calls
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

// Rounds of calls to the places of a list, in its order. At first one call is
// open at a time, and twice as many whenever those have brought nothing for a
// while: a launcher that is slow is no reason to call all others.
class Calls {
 public:
  struct Ended {
    size_t index;  // in the list; kNamed
    Call call;
    Call::State state;
  };
  static constexpr size_t kNamed = SIZE_MAX;

  Calls(
      std::vector<Endpoint> places, const authentication::Key& key,
      std::string hello)
      : places_(std::move(places)), key_(key), hello_(std::move(hello)) {}

  void add_files(std::vector<pollfd>& files) const {
    for (const Open& open : open_) {
      files.push_back({open.call.fd(), open.call.events(), 0});
    }
  }

  /// Begins calls to the first `limit` places, without those that `skips`, and
  /// returns those that have ended.
  template <typename Skips>
  std::vector<Ended> advance(size_t limit, const Skips& skips) {
    const auto now = steady_clock::now();
    begin(now, limit, skips);
    std::vector<Ended> ended;
    for (size_t i = 0; i < open_.size();) {
      const auto state = open_[i].call.advance();
      if (state == Call::State::open) {
        ++i;
        continue;
      }
      ended.push_back({open_[i].index, std::move(open_[i].call), state});
      open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (ended.empty() && open_.empty() && next_ >= limit && limit > 0) {
      next_ = 0;
      ++rounds_;
      begin_ = now + kCallAgain * (1 << std::min(rounds_ - 1, kMostDoublings));
    }
    return ended;
  }

  /// Calls a place that an answer named, unless such a call is open.
  void call(const Endpoint& place) {
    if (!is_calling(place) && std::ranges::none_of(open_, &Open::is_named)) {
      open_.push_back({kNamed, Call(place, key_, hello_)});
    }
  }

  /// Gives up the round, and begins the next one soon.
  void begin_again() {
    std::erase_if(open_, [](const Open& open) { return !open.is_named(); });
    next_ = 0;
    begin_ = steady_clock::now() + kCallAgain;
  }

  int rounds() const { return rounds_; }

 private:
  static constexpr size_t kMostOpen = 256;
  // A call that is connected has reached a launcher, which is slow or stopped.
  static constexpr milliseconds kPatience{500};

  struct Open {
    size_t index;
    Call call;
    bool is_named() const { return index == kNamed; }
  };

  bool is_calling(const Endpoint& place) const {
    return std::ranges::any_of(
        open_, [&](const Open& open) { return open.call.place() == place; });
  }

  template <typename Skips>
  void begin(TimePoint now, size_t limit, const Skips& skips) {
    if (now < begin_) return;
    size_t open = 0;
    bool connected = false;
    for (const Open& one : open_) {
      open += one.is_named() ? 0 : 1;
      connected = connected || one.call.is_connected();
    }
    if (open == 0) grown_ = now;
    if (open >= most_open_ &&
        now - grown_ >= (connected ? kPatience : kCallAgain)) {
      most_open_ = std::min(2 * most_open_, kMostOpen);
      grown_ = now;
    }
    for (; next_ < limit && open < most_open_; ++next_) {
      if (skips(next_) || is_calling(places_[next_])) continue;
      open_.push_back({next_, Call(places_[next_], key_, hello_)});
      ++open;
    }
  }

  const std::vector<Endpoint> places_;
  const authentication::Key key_;
  const std::string hello_;
  std::vector<Open> open_;
  size_t most_open_ = 1;
  TimePoint grown_{};
  TimePoint begin_{};  // of the round
  size_t next_ = 0;    // place to call
  int rounds_ = 0;     // that are over
};

}  // namespace

// Becomes a host that the one at `place` leads, or one where that sends it.
bool Hosts::follow(const Endpoint& place, SignalFile& signals) {
  return follow_one_of({place}, kSettleHosts, signals);
}

// A spare that has lost the coordinator asks the other hosts, of which one will
// coordinate. After the first few it does so in an order of its own: those may
// be lost together.
bool Hosts::find_job_again(SignalFile& signals) {
  std::vector<Endpoint> places;
  for (const Member& member : known_) places.push_back(member.place);
  if (places.size() > kCalledFirst) {
    std::shuffle(
        places.begin() + kCalledFirst, places.end(),
        std::mt19937(std::random_device()()));
  }
  return follow_one_of(std::move(places), options_->join_timeout, signals);
}

bool Hosts::follow_one_of(
    std::vector<Endpoint> places, milliseconds patience, SignalFile& signals) {
  const size_t number = places.size();
  Calls calls(std::move(places), token_.key, hello().dump());
  const Deadline deadline(patience);
  while (!deadline.passed() || calls.rounds() == 0) {
    std::vector<pollfd> files;
    calls.add_files(files);
    if (!wait(signals, 50, files)) return false;
    for (auto& ended : calls.advance(number, [](size_t) { return false; })) {
      if (ended.state != Call::State::answered) continue;
      if (lead_by(ended.call)) return true;
      if (const auto place = sent_to(ended.call)) calls.call(*place);
    }
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
  other_.reset();
  note_waiting(answer);
  return true;
}

void Hosts::regroup(SignalFile& signals) {
  struct Other {
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
  // In the order of calls: the lower ones, and then those above.
  const auto num_lower = static_cast<size_t>(node_);
  std::vector<size_t> nodes(members_.size());
  std::iota(nodes.begin(), nodes.end(), 0);
  nodes.erase(nodes.begin() + node_);
  if (num_lower > kCalledFirst) {
    std::reverse(nodes.begin() + kCalledFirst, nodes.begin() + node_);
  }
  std::vector<Endpoint> places;
  for (const size_t node : nodes) places.push_back(members_[node].place);
  Calls calls(std::move(places), token_.key, hello().dump());
  std::vector<Other> others(members_.size());
  tell_user("this host looks for the others of the job");
  const Deadline deadline(options_->join_timeout);
  Deadline settled(kSettleHosts);
  Deadline quiet(kCallOthers);
  int most = 0;
  Notice notice;
  while (!deadline.passed()) {
    std::vector<pollfd> files;
    calls.add_files(files);
    if (!wait(signals, 50, files)) return;
    if (other_) calls.call(*std::exchange(other_, std::nullopt));
    const std::vector<bool> here = present();
    int together = 0;
    int dead = 0;
    bool lowest = true;
    for (size_t node = 0; node < others.size(); ++node) {
      const Other& other = others[node];
      together += here[node] ? 1 : 0;
      dead += !here[node] && other.dead ? 1 : 0;
      lowest = lowest && (here[node] || node > num_lower || other.silent);
    }
    if (together > most) {
      most = together;
      settled = Deadline(kSettleHosts);
      quiet = Deadline(kCallOthers);
    }
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
    const size_t limit = lowest && quiet.passed() ? nodes.size() : num_lower;
    for (auto& [index, call, state] :
         calls.advance(limit, [&](size_t i) { return here[nodes[i]]; })) {
      if (state == Call::State::answered) {
        if (lead_by(call)) return;
        const auto place = sent_to(call);
        if (place && *place != listener_->place()) calls.call(*place);
      }
      if (index == Calls::kNamed) continue;
      others[nodes[index]] = {
          .silent = state != Call::State::answered,
          .dead = state == Call::State::refused};
      // A lower host that lives takes this one or knows another that does, now
      // or soon.
      if (state == Call::State::answered && index < num_lower) {
        calls.begin_again();
      }
    }
  }
  const auto together = std::ranges::count(present(), true);
  tell_user(format(
      "after {} this host has found {} of the job's {} hosts, too few to go on",
      deadline.seconds(), together, num_hosts()));
  exit_code_ = static_cast<int>(ExitCode::failure);
  finish(exit_code_);
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
