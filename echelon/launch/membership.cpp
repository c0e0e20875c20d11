// Who is in a job of several hosts, and who coordinates it.
//
// At first node 0 listens at the master's address, and the others connect,
// retrying until the deadline. Each says its protocol, --nnodes, --node-rank,
// number of ranks, and where it listens itself. Node 0 refuses what does not
// match. When enough have come it numbers hosts and ranks, and tells each its
// place and the places of all: that starts a generation. The socket of rank 0's
// store is another one for each generation, on a port of its own.
//
// A host that comes later waits until the coordinator takes it into a new
// generation. Hosts that do not coordinate send it on to the one that does.
//
// When the coordinator is lost, the hosts regroup (regroup.cpp).
//
// The store's key is made from the token and the job's id, so that it is never
// sent.
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "echelon/error.h"
#include "echelon/launch/checks.h"
#include "echelon/launch/growth.h"
#include "echelon/launch/hosts.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::launch {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Raised when the launchers' messages change.
constexpr int kProtocol = 3;
// The members in one message.
constexpr size_t kMostMembers = 256;
// How long hosts beyond the least number are waited for at the start.
constexpr milliseconds kLastCall{3000};
// How long choosing a layout may take.
constexpr milliseconds kBusy{120000};
constexpr const char* kNoLauncher = "it does not speak as a launcher";

// Whether `value` is an integer from `least` to `most`. A conversion to int
// would wrap a larger one around.
bool is_integer(const json& value, int least, int most) {
  return value.is_number_integer() && value >= least && value <= most;
}

int least_nodes(const LaunchOptions& options) {
  return options.least_nodes > 0 ? options.least_nodes : options.num_nodes;
}

// The store's port is free, and kept from other launchers of this host.
void bind_store(JobStart& start, const std::string& address, bool listens) {
  constexpr int kTries = 10;
  for (int i = 0;; ++i) {
    BoundSocket bound = bind_master(address, 0);
    try {
      start.claim = claim_port(bound.address, bound.port);
    } catch (const ConfigError&) {
      if (i == kTries) throw;
      continue;
    }
    if (listens) listen(bound.socket.fd(), 1024);
    start.place.master_addr = bound.address;
    start.place.master_port = bound.port;
    start.master = std::move(bound.socket);
    return;
  }
}

}  // namespace

authentication::Key Hosts::key_for(const std::string& purpose) const {
  return token_.key.derive(format("{} of job {}", purpose, job_));
}

json Hosts::hello() const {
  json message = {
      {"protocol", kProtocol},
      {"nodes", options_->num_nodes},
      {"least", least_nodes(*options_)},
      {"node_rank", options_->joins ? -1 : options_->node_rank},
      {"ranks", options_->num_ranks},
      {"port", listener_->place().port},
      {"identity", options_->identity}};
  if (generation_ >= 0) {
    message["job"] = job_;
    message["generation"] = generation_;
  }
  return message;
}

void Hosts::take_caller(HostListener::Caller caller) {
  const json message = json::parse(caller.message, nullptr, false);
  Peer newcomer;
  newcomer.link = std::move(caller.link);
  std::string reason = kNoLauncher;
  try {
    if (message.contains("coordinator")) {
      // A job runs without this first host.
      const json& place = message["coordinator"];
      if (coordinates_ && generation_ < 0) {
        other_ = Endpoint{place.at(0), place.at(1)};
      }
      tell_to_wait(newcomer);
      return;
    }
    reason = take_hello(newcomer, message);
  } catch (const json::exception&) {
  }
  if (!reason.empty()) {
    HostListener::refuse(newcomer.link, reason);
    return;
  }
  const bool led = !coordinates_ && !peers_.empty() && peers_[0].link.is_open();
  if (led && !regrouping_) {
    const Endpoint& place = peers_[0].place;
    newcomer.link.say({{"go_to", {place.address, place.port}}});
    return;
  }
  if (!coordinates_ && newcomer.node >= 0 && newcomer.node < node_) {
    if (regrouping_) other_ = newcomer.place;
    newcomer.link.say({{"regrouping", true}});
    return;
  }
  tell_to_wait(newcomer);
  // It has given up the connection before.
  if (newcomer.node >= 0) {
    std::erase_if(
        waiting_, [&](const Peer& peer) { return peer.node == newcomer.node; });
  }
  waiting_.push_back(std::move(newcomer));
}

// For a host that waits: whether the job runs without it, and which hosts it
// may ask when this one is lost. One of this generation knows them.
void Hosts::tell_to_wait(Peer& peer) const {
  peer.link.say(
      {{"waiting", coordinates_ && generation_ >= 0}, {"of", members_.size()}});
  if (peer.node < 0) peer.link.say_lines(member_lines_);
}

// The text that tells others of them is made once: it is as long as the job has
// hosts, and goes to each of them.
void Hosts::set_members(std::vector<Member> members) {
  members_ = std::move(members);
  member_lines_.clear();
  for (size_t begin = 0; begin < members_.size(); begin += kMostMembers) {
    json list = json::array();
    const size_t end = std::min(begin + kMostMembers, members_.size());
    for (size_t i = begin; i < end; ++i) {
      const Member& member = members_[i];
      list.push_back(
          {member.place.address, member.place.port, member.num_ranks});
    }
    member_lines_ += json{{"members", std::move(list)}, {"from", begin}}.dump();
    member_lines_ += "\n";
  }
}

// Throws json::exception when it is no such message.
void Hosts::note_members(const json& message) {
  if (message.at("from") == 0) known_.clear();
  if (message.at("from") != known_.size()) return;
  for (const json& member : message.at("members")) {
    known_.push_back({{member.at(0), member.at(1)}, member.at(2)});
  }
}

// Throws json::exception when it is no such message.
void Hosts::note_waiting(const json& message) {
  spare_ = message.at("waiting").get<bool>();
  if (message.at("of") == 0) known_.clear();
}

// Fills in the newcomer, or returns why it is refused.
std::string Hosts::take_hello(Peer& newcomer, const json& hello) {
  const json& nodes = hello.at("nodes");
  const json& node = hello.at("node_rank");
  const json& ranks = hello.at("ranks");
  if (hello.at("protocol") != kProtocol) {
    return "it is another version of the launcher";
  }
  if (!nodes.is_number() || !node.is_number() || !ranks.is_number()) {
    return kNoLauncher;
  }
  const int most = options_->num_nodes;
  if (!is_integer(nodes, most, most)) {
    return format(
        "node 0 has --nnodes {}, this one has {}", most, nodes.dump());
  }
  const int least = least_nodes(*options_);
  if (!is_integer(hello.at("least"), least, least)) {
    return format(
        "node 0 has --nnodes {}:{}, this one has {}:{}", least, most,
        hello["least"].dump(), most);
  }
  const bool joins = is_integer(node, -1, -1);
  if (!joins && !is_integer(node, generation_ < 0 ? 1 : 0, most - 1)) {
    return format(
        "--node-rank {} is out of range: with --nnodes {} it is 1 to {}",
        node.dump(), most, most - 1);
  }
  if (!is_integer(ranks, 1, kMaxRanksPerHost)) {
    return format(
        "{} ranks on one host are out of range: it is 1 to {}", ranks.dump(),
        kMaxRanksPerHost);
  }
  if (!is_integer(hello.at("port"), 1, 65535)) return kNoLauncher;
  if (hello.at("identity") != options_->identity) {
    return "it has another configuration or another version of the program";
  }
  newcomer.wanted = node;
  newcomer.num_ranks = ranks;
  newcomer.place = {newcomer.link.address(), hello.at("port")};
  // A launcher is known by where it listens.
  if (generation_ >= 0 && hello.value("job", "") == job_) {
    for (int i = 0; i < num_hosts(); ++i) {
      if (members_[static_cast<size_t>(i)].place == newcomer.place) {
        newcomer.node = i;
      }
    }
    newest_ = std::max(newest_, hello.value("generation", 0));
  }
  if (generation_ < 0 && !joins) {
    for (const auto* list : {&peers_, &waiting_}) {
      for (const Peer& other : *list) {
        if (other.wanted == newcomer.wanted && other.link.is_open()) {
          return format(
              "another host, {}, already has --node-rank {}",
              other.link.address(), newcomer.wanted);
        }
      }
    }
  }
  return "";
}

// The hosts that are waited for; empty when all have come.
std::string Hosts::missing() const {
  const int count = 1 + static_cast<int>(peers_.size());
  const int least = least_nodes(*options_);
  if (count >= options_->num_nodes) return "";
  if (least < options_->num_nodes || generation_ >= 0) {
    return format("{} of {}", counted(least - count, "more host"), least);
  }
  constexpr int kShown = 8;
  std::set<int> came;
  for (const Peer& peer : peers_) came.insert(peer.wanted);
  std::string text;
  int absent = 0;
  for (int node = 1; node < options_->num_nodes; ++node) {
    if (came.contains(node)) continue;
    if (absent < kShown) {
      text += (absent == 0 ? "" : ", ") + std::to_string(node);
    }
    ++absent;
  }
  if (absent > kShown) text += format(" and {} more", absent - kShown);
  return (absent == 1 ? "node " : "nodes ") + text;
}

// Which hosts of the last generation are together, this one included.
std::vector<bool> Hosts::present() const {
  std::vector<bool> nodes(members_.size());
  nodes[static_cast<size_t>(node_)] = true;
  for (const auto* list : {&peers_, &waiting_}) {
    for (const Peer& peer : *list) {
      if (peer.node >= 0 && peer.link.is_open()) {
        nodes[static_cast<size_t>(peer.node)] = true;
      }
    }
  }
  return nodes;
}

// Serves the connections, until something comes there or for one of `more`.
// False when a signal has ended the job.
bool Hosts::wait(
    SignalFile& signals, int timeout_ms, const std::vector<pollfd>& more) {
  std::vector<pollfd> files = {{signals.fd(), POLLIN, 0}};
  add_files(files);
  files.insert(files.end(), more.begin(), more.end());
  if (std::ranges::any_of(
          peers_, [](const Peer& peer) { return peer.link.has_message(); })) {
    timeout_ms = 0;
  }
  if (const auto next = deadline()) {
    timeout_ms = std::min(
        timeout_ms,
        static_cast<int>(std::max<int64_t>(
            0, std::chrono::ceil<milliseconds>(*next - steady_clock::now())
                   .count())));
  }
  poll(files.data(), files.size(), timeout_ms);
  for (const HostEvent& event : serve(files.data() + 1)) {
    if (event.kind != HostEvent::stopped) continue;
    stop(event.number);
    return false;
  }
  while (const int signal = signals.next()) {
    if (signal != SIGINT && signal != SIGTERM && signal != SIGHUP &&
        signal != SIGQUIT) {
      continue;
    }
    tell({{"stopped", signal}});
    stop(signal);
    return false;
  }
  return true;
}

void Hosts::stop(int signal) {
  exit_code_ = static_cast<int>(
      options_->preemptible && signal == SIGTERM ? ExitCode::preempted
                                                 : ExitCode::interrupted);
  tell_user("stopped by " + signal_name(signal));
  if (coordinates_) finish(exit_code_);
}

std::optional<JobStart> Hosts::next(bool may_restart, SignalFile& signals) {
  exit_code_ = -1;
  for (;;) {
    auto start =
        coordinates_ ? gather(may_restart, signals) : wait_for_start(signals);
    if (start || exit_code_ >= 0) return start;
    if (other_) {
      const Endpoint place = *std::exchange(other_, std::nullopt);
      if (follow(place, signals)) continue;
      if (exit_code_ >= 0) return std::nullopt;
    }
    if (generation_ < 0) {
      if (coordinates_) continue;
      throw ConfigError(format(
          "[launch] the host at {}, which another host of the job named, does "
          "not answer; is the job over?",
          master_text(*options_)));
    }
    regroup(signals);
    if (exit_code_ >= 0) return std::nullopt;
  }
}

// The next generation, from the hosts that there are. Nothing when the job is
// over, when another host coordinates it, or when there is no quorum.
std::optional<JobStart> Hosts::gather(bool may_restart, SignalFile& signals) {
  const bool first = generation_ < 0;
  const int most = options_->num_nodes;
  const int least = least_nodes(*options_);
  if (!first && !std::exchange(has_quorum_, false)) {
    const auto together = static_cast<int>(std::ranges::count(present(), true));
    if (!have_quorum(together, num_hosts(), /*dead=*/0, /*coordinator=*/true)) {
      return std::nullopt;
    }
  }
  for (Peer& peer : peers_) {
    if (!peer.leaves) continue;
    peer.link.say({{"over", static_cast<int>(ExitCode::preempted)}});
    peer.link.close();
  }
  Notice notice;
  const Deadline deadline(options_->join_timeout);
  std::optional<Deadline> last_call;
  for (;;) {
    std::erase_if(peers_, [&](const Peer& peer) {
      return !peer.link.is_open() ||
             (peer.node >= 0 &&
              std::ranges::find(waiting_, peer.node, &Peer::node) !=
                  waiting_.end());
    });
    // The ranks start anew in any case.
    for (size_t left = newcomers(/*change=*/0); left > 0; --left) {
      peers_.push_back(std::move(waiting_.front()));
      waiting_.erase(waiting_.begin());
    }
    const int count = 1 + static_cast<int>(peers_.size());
    if (count >= least) {
      if (!last_call) last_call.emplace(first ? kLastCall : milliseconds(0));
      if (count == most || last_call->passed()) {
        if (choose_layout()) return start_generation(may_restart);
        if (exit_code_ >= 0) return std::nullopt;
        continue;
      }
    }
    if (other_) return std::nullopt;
    if (deadline.passed()) {
      const std::string text = format(
          "after {} {} had not come to {}; start the launcher there with the "
          "same --nnodes, --master-addr and --master-port",
          deadline.seconds(),
          missing() + (least == most && first ? format(" of {}", most) : ""),
          master_text(*options_));
      if (first) throw ConfigError("[launch] " + text);
      tell_user(text);
      exit_code_ = static_cast<int>(ExitCode::failure);
      finish(exit_code_);
      return std::nullopt;
    }
    if (count < least && notice.is_due()) {
      notice.show(missing() + " at " + master_text(*options_));
    }
    if (!wait(signals, deadline.left_ms(milliseconds(100)))) {
      return std::nullopt;
    }
  }
}

int Hosts::total_ranks() const {
  int total = options_->num_ranks;
  for (const Peer& peer : peers_) total += peer.num_ranks;
  return total;
}

// Whether the job can go on with so many ranks.
bool Hosts::has_layout(int num_ranks) {
  if (!options_->resize || num_ranks == world_size_) return true;
  if (without_layout_.contains(num_ranks)) return false;
  try {
    say_busy(kBusy);
    options_->resize(num_ranks);
    return true;
  } catch (const ConfigError&) {
    without_layout_.insert(num_ranks);
    return false;
  }
}

// Whether the job is faster with `then` ranks, by more than the change costs.
bool Hosts::pays(int now, int then, double change) {
  if (!options_->step_seconds) return true;
  const auto step_now = options_->step_seconds(now);
  const auto step_then = options_->step_seconds(then);
  if (!step_now || !step_then) return false;  // it is asked again
  const std::string why = why_not_grow({*step_now, *step_then, change});
  if (!why.empty() && without_gain_.insert(then).second) {
    tell_user("a host that has come waits as a spare: " + why);
  }
  return why.empty();
}

// How many of the hosts that wait are taken in: those that are needed, those in
// place of hosts that were lost, and those that make the job faster.
size_t Hosts::newcomers(double change) {
  int count = 1 + static_cast<int>(peers_.size());
  int ranks = total_ranks();  // with the hosts that are taken so far
  int with = ranks;
  size_t taken = 0;
  for (size_t i = 0; i < waiting_.size() && count < options_->num_nodes; ++i) {
    with += waiting_[i].num_ranks;
    const bool needed = count < least_nodes(*options_);
    const bool replaces = generation_ < 0 || count < num_hosts();
    ++count;
    if (!needed && !replaces && !pays(ranks, with, change)) continue;
    if (!needed && !has_layout(with)) continue;
    taken = i + 1;
    ranks = with;
    change = 0;
  }
  return taken;
}

// Chooses a layout when the number of ranks changes. False when there is none,
// and the host that came last waits; or when there is none for the least number
// of hosts, and the job is over.
bool Hosts::choose_layout() {
  const int total = total_ranks();
  if (!has_layout(total) &&
      static_cast<int>(peers_.size()) + 1 > least_nodes(*options_)) {
    tell_to_wait(peers_.back());
    waiting_.push_back(std::move(peers_.back()));
    peers_.pop_back();
    return false;
  }
  try {
    if (options_->resize && total != world_size_) {
      layout_ = options_->resize(total);
    }
    world_size_ = total;
    return true;
  } catch (const ConfigError& error) {
    if (generation_ < 0) throw;
    tell_user(format("the hosts that are left cannot go on: {}", error.what()));
  }
  exit_code_ = static_cast<int>(ExitCode::configuration);
  finish(exit_code_);
  return false;
}

JobStart Hosts::start_generation(bool may_restart) {
  listener_->close_strangers();
  // Hosts keep their order; those that are new come last, by --node-rank.
  const auto order = [](const Peer& peer) {
    return std::tuple(peer.node < 0, peer.node, peer.wanted < 0, peer.wanted);
  };
  std::ranges::stable_sort(peers_, {}, order);
  if (job_.empty()) job_ = random_job_id();
  generation_ = std::max(generation_, newest_) + 1;
  may_restart_ = may_restart;
  const int before = num_hosts();
  node_ = 0;
  std::vector<Member> members = {{listener_->place(), options_->num_ranks}};
  for (Peer& peer : peers_) {
    peer.node = static_cast<int>(members.size());
    members.push_back({peer.place, peer.num_ranks});
  }
  set_members(std::move(members));
  if (generation_ > 0 && num_hosts() != before) {
    tell_user(format(
        "{}, {}{}", counted(num_hosts(), "host"), counted(world_size_, "rank"),
        layout_.empty() ? "" : ", " + layout_));
  }
  JobStart start;
  bind_store(start, listener_->place().address, options_->listen_early);
  json message = {
      {"job", job_},
      {"generation", generation_},
      {"world_size", world_size_},
      {"master", {start.place.master_addr, start.place.master_port}},
      {"first", {master_.address, master_.port}},
      {"layout", layout_},
      {"may_restart", may_restart_},
      {"hosts", num_hosts()}};
  for (Peer& peer : waiting_) {
    peer.node = -1;  // of the generation before
    tell_to_wait(peer);
  }
  int first_rank = 0;
  for (Peer& peer : peers_) {
    first_rank += members_[static_cast<size_t>(peer.node) - 1].num_ranks;
    message["node"] = peer.node;
    message["first_rank"] = first_rank;
    peer.link.say_lines(member_lines_);
    peer.link.say({{"start", message}});
  }
  message["node"] = 0;
  message["first_rank"] = 0;
  JobStart own = take_start(message);
  own.master = std::move(start.master);
  own.claim = std::move(start.claim);
  return own;
}

// Throws json::exception when it is no start.
JobStart Hosts::take_start(const json& message) {
  job_ = message.at("job");
  generation_ = message.at("generation");
  node_ = message.at("node");
  world_size_ = message.at("world_size");
  layout_ = message.at("layout");
  spare_ = false;
  master_ = {message.at("first").at(0), message.at("first").at(1)};
  may_restart_ = message.at("may_restart");
  if (!coordinates_) {
    if (message.at("hosts") != known_.size()) {
      throw ConfigError(format(
          "[launch] node 0 told of {} of the job's {} hosts; start it again",
          known_.size(), message["hosts"].dump()));
    }
    set_members(known_);
    peers_[0].node = 0;
    peers_[0].place = members_.at(0).place;
  }
  JobStart start;
  start.place.job = job_;
  start.place.generation = generation_;
  start.place.master_addr = message.at("master").at(0);
  start.place.master_port = message.at("master").at(1);
  start.place.node_address = listener_->place().address;
  start.place.store_key = key_for("store").to_hex();
  start.first_rank = message.at("first_rank");
  start.world_size = world_size_;
  start.node_rank = node_;
  start.num_nodes = num_hosts();
  start.layout = layout_;
  start.may_restart = may_restart_;
  begin_generation();
  return start;
}

// Nothing when the coordinator is lost or another one is named, and when the
// job is over.
std::optional<JobStart> Hosts::wait_for_start(SignalFile& signals) {
  const std::string place = master_text(*options_);
  const Deadline deadline(options_->join_timeout);
  Notice notice;
  bool told = false;
  for (;;) {
    if (!start_.empty()) {
      try {
        return take_start(json::parse(std::exchange(start_, "")));
      } catch (const json::exception&) {
        throw ConfigError(format(
            "[launch] what answers at {} is not a launcher; give another "
            "--master-port",
            place));
      }
    }
    if (!refused_.empty()) {
      throw ConfigError(format(
          "[launch] node 0 at {} does not take this host: {}", place,
          refused_));
    }
    if (exit_code_of_job_) {
      exit_code_ = *exit_code_of_job_;
      return std::nullopt;
    }
    if (other_) return std::nullopt;
    if (peers_.empty() || !peers_[0].link.is_open()) {
      if (generation_ < 0) {
        if (spare_ && find_job_again(signals)) continue;
        if (exit_code_ >= 0) return std::nullopt;
        throw ConfigError(format(
            "[launch] what answers at {} is not the launcher of this job, or "
            "it ended; give another --master-port",
            place));
      }
      if (!may_restart_ || (end_ && end_->exit_code == 0)) {
        exit_code_ = end_ ? end_->exit_code : 1;
      }
      return std::nullopt;
    }
    if (spare_ && !std::exchange(told, true)) {
      tell_user(
          "the job runs on other hosts; this one waits until it is taken in");
    }
    if (!spare_ && generation_ < 0) {
      if (deadline.passed()) {
        throw ConfigError(format(
            "[launch] node 0 at {} did not start the job within {}; it waits "
            "for other nodes, or another program has that port",
            place, deadline.seconds()));
      }
      notice.show(format("node 0 at {}, which waits for other nodes", place));
    }
    if (!wait(signals, 500)) return std::nullopt;
  }
}

}  // namespace echelon::launch
