// Messages are lines of JSON over TCP. Every other node connects to node 0,
// retrying until the deadline. Both prove that they have the token; then the
// node says its protocol, --nnodes, --node-rank and number of ranks. Node 0
// refuses what does not match, forgets a node that leaves before the job
// starts, and when all have come answers each with job id, first rank and world
// size: ranks follow the order of the nodes. Anyone may connect, and must not
// keep the hosts out: a connection that proves nothing is closed after a while,
// or as soon as there are too many of them, and a node that loses its
// connection in that way comes again. The connections stay open for the job
// (hosts.h). From the start node 0 holds a second socket on the same port for
// rank 0's store, so that no other program can take the port in between. The
// store's key is made from the token and the job's id, so that it is never
// sent.
#include "echelon/launch/hosts.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "echelon/authentication/handshake.h"
#include "echelon/authentication/strangers.h"
#include "echelon/error.h"
#include "echelon/launch/checks.h"
#include "echelon/text/format.h"

namespace echelon::launch {
namespace {

using authentication::address_of;
using authentication::Handshake;
using authentication::Port;
using authentication::State;
using authentication::Token;
using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Raised when the launchers' messages change.
constexpr int kProtocol = 1;
constexpr int kDefaultMasterPort = 29500;
constexpr size_t kMaxMessage = 64 << 10;
constexpr milliseconds kSilence{3000};  // before telling the user to wait
constexpr milliseconds kProofTimeout{2000};
constexpr milliseconds kHelloTimeout{5000};
constexpr milliseconds kMaxRetries{10000};  // when every connection is closed
constexpr size_t kMaxStrangers = 256;       // besides the job's hosts
constexpr const char* kNoLauncher = "it does not speak as a launcher";

class Deadline {
 public:
  explicit Deadline(milliseconds span) : span_(span) {}
  steady_clock::time_point end() const { return begin_ + span_; }
  bool passed() const { return steady_clock::now() >= end(); }
  int left_ms(milliseconds at_most) const {
    const auto left =
        std::chrono::ceil<milliseconds>(end() - steady_clock::now());
    return static_cast<int>(std::clamp(left, milliseconds(0), at_most).count());
  }
  std::string seconds() const {
    const auto tenths = span_.count() / 100;
    return tenths % 10 == 0 ? format("{} s", tenths / 10)
                            : format("{}.{} s", tenths / 10, tenths % 10);
  }

 private:
  steady_clock::time_point begin_ = steady_clock::now();
  milliseconds span_;
};

/// Tells the user once, after a silence, what is waited for.
class Notice {
 public:
  void show(const std::string& awaited) {
    if (told_ || !silence_.passed()) return;
    told_ = true;
    std::fprintf(stderr, "echelon: waiting for %s\n", awaited.c_str());
  }

 private:
  Deadline silence_{kSilence};
  bool told_ = false;
};

// A host that loses power or its cable does not close its connections.
void enable_keepalive(int fd) {
  const int yes = 1;
  const int idle = 5;
  const int interval = 2;
  const int count = 4;
  const unsigned unanswered_ms = 15000;
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof yes);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
  setsockopt(
      fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unanswered_ms, sizeof unanswered_ms);
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
}

bool send_line(int fd, const json& value) {
  const std::string line =
      value.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
  return send(fd, line.data(), line.size(), MSG_NOSIGNAL) ==
         static_cast<ssize_t>(line.size());
}

enum class Received { nothing, line, end };

// Appends the bytes that have come to `unread` and takes one line out of it.
Received receive(int fd, std::string& unread, std::string& line) {
  char bytes[4096];
  const ssize_t size = recv(fd, bytes, sizeof bytes, MSG_DONTWAIT);
  if (size > 0) unread.append(bytes, size);
  const size_t end = unread.find('\n');
  if (end != std::string::npos) {
    line = unread.substr(0, end);
    unread.erase(0, end + 1);
    return Received::line;
  }
  const bool waits =
      size > 0 || (size < 0 && (errno == EAGAIN || errno == EINTR));
  return waits && unread.size() < kMaxMessage ? Received::nothing
                                              : Received::end;
}

// Whether `value` is an integer from `least`, which is 0 or more, to `most`. A
// conversion to int would wrap a larger one around.
bool is_integer(const json& value, int least, int most) {
  return value.is_number_integer() && value >= least && value <= most;
}

int port_of(const LaunchOptions& options) {
  return options.master_port != 0 ? options.master_port : kDefaultMasterPort;
}

std::string place_of(const LaunchOptions& options) {
  return format("{}, port {}", options.master_addr, port_of(options));
}

std::string store_key(const Token& token, const std::string& job) {
  return token.key.derive("store of job " + job).to_hex();
}

/// Node 0's side of the rendezvous.
class RendezvousHost {
 public:
  RendezvousHost(const LaunchOptions& options, const Token& token)
      : options_(options),
        token_(token),
        proof_timeout_(std::min(kProofTimeout, options.join_timeout / 4)),
        hello_timeout_(std::min(kHelloTimeout, options.join_timeout / 4)),
        nodes_(options.num_nodes) {}

  Rendezvous run() {
    open();
    Notice notice;
    const Deadline deadline(options_.join_timeout);
    while (!missing().empty()) {
      if (deadline.passed()) {
        throw ConfigError(format(
            "[launch] after {} {} of {} had not come to {}; start the launcher "
            "there with the same --nnodes, --master-addr and --master-port",
            deadline.seconds(), missing(), options_.num_nodes,
            place_of(options_)));
      }
      notice.show(missing() + " at " + place_of(options_));
      wait(deadline.left_ms(milliseconds(500)));
    }
    return assign_ranks();
  }

 private:
  struct Node {
    FileDescriptor socket;
    std::string unread;
    int num_ranks = 0;
    int node = -1;
    std::optional<Handshake> handshake;  // until it has proved the token
    Deadline silence{milliseconds(0)};   // until when it must have said more
  };

  // Binds two sockets to one port: one for the rendezvous, one for the store
  // afterwards. The system allows it while neither listens.
  void open() {
    BoundSocket bound = bind_master(options_.master_addr, port_of(options_));
    listener_ = std::move(bound.socket);
    address_ = bound.address;
    refuse_loopback_name();
    claim_ = claim_port(bound.address, bound.port);
    store_ = bind_master(bound.address, bound.port).socket;
    if (listen(listener_.fd(), 1024) != 0) {
      throw ConfigError(format(
          "[launch] master {}: the port is in use ({}); give another "
          "--master-port",
          place_of(options_), std::strerror(errno)));
    }
  }

  // /etc/hosts often maps a host's own name to 127.0.1.1.
  void refuse_loopback_name() const {
    in_addr ignored;
    if (address_.rfind("127.", 0) == 0 && options_.master_addr != "localhost" &&
        inet_pton(AF_INET, options_.master_addr.c_str(), &ignored) != 1) {
      throw ConfigError(format(
          "[launch] --master-addr {} is {} on this host, which no other host "
          "reaches; give the number of its address",
          options_.master_addr, address_));
    }
  }

  std::string missing() const {
    std::string text;
    int count = 0;
    for (int node = 1; node < options_.num_nodes; ++node) {
      if (nodes_[node].socket.fd() < 0) {
        text += (count++ == 0 ? "" : ", ") + std::to_string(node);
      }
    }
    return text.empty() ? text : (count == 1 ? "node " : "nodes ") + text;
  }

  void wait(int timeout_ms) {
    std::vector<pollfd> files = {{listener_.fd(), POLLIN, 0}};
    for (const Node& newcomer : newcomers_) {
      files.push_back({newcomer.socket.fd(), POLLIN, 0});
    }
    for (const Node& node : nodes_) {
      files.push_back({node.socket.fd(), POLLIN, 0});
    }
    poll(files.data(), files.size(), timeout_ms);
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (files[1 + newcomers_.size() + i].revents != 0) {
        // An admitted node sends nothing before all have come: it left.
        nodes_[i] = Node();
      }
    }
    std::vector<Node> remaining;
    for (size_t i = 0; i < newcomers_.size(); ++i) {
      Node& newcomer = newcomers_[i];
      if (files[1 + i].revents != 0 && advance(newcomer)) continue;
      if (newcomer.silence.passed()) {
        refuse(
            newcomer,
            format(
                "it did not {} within {}",
                newcomer.handshake ? "prove the token" : "say which node it is",
                newcomer.silence.seconds()));
      } else {
        remaining.push_back(std::move(newcomer));
      }
    }
    newcomers_ = std::move(remaining);
    if (files[0].revents != 0) accept_newcomer();
  }

  // Makes room by closing the connection that has proved nothing for longest: a
  // host does so at once.
  void accept_newcomer() {
    Node newcomer;
    newcomer.socket =
        FileDescriptor(accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC));
    const bool accepted = newcomer.socket.is_open();
    const bool full = !accepted && (errno == EMFILE || errno == ENFILE ||
                                    errno == ENOBUFS || errno == ENOMEM);
    if (full && newcomers_.empty()) {
      throw ConfigError(format(
          "[launch] cannot take the connection of another host at {}: {}; "
          "`ulimit -n` tells and sets how many files may be open",
          place_of(options_), std::strerror(errno)));
    }
    if (full || newcomers_.size() >= nodes_.size() + kMaxStrangers) {
      auto victim = std::ranges::find_if(
          newcomers_, [](const Node& node) { return !!node.handshake; });
      if (victim == newcomers_.end()) victim = newcomers_.begin();
      refuse(
          *victim, format(
                       "it did not prove the token, and {} connections wait",
                       newcomers_.size()));
      newcomers_.erase(victim);
    }
    if (!accepted) return;
    enable_keepalive(newcomer.socket.fd());
    newcomer.handshake.emplace(
        token_.key, Port::launchers, Handshake::End::server);
    newcomer.silence = Deadline(proof_timeout_);
    newcomers_.push_back(std::move(newcomer));
  }

  // Who has not proved the token is told nothing.
  void refuse(Node& newcomer, const std::string& reason) {
    if (newcomer.handshake) {
      strangers_.tell(newcomer.socket.fd(), reason);
    } else {
      send_line(newcomer.socket.fd(), {{"refused", reason}});
    }
    newcomer.socket.close();
  }

  // Takes what a newcomer sent. True when it is none any more: it was admitted,
  // refused, or has left.
  bool advance(Node& newcomer) {
    if (!newcomer.handshake) return admit(newcomer);
    switch (newcomer.handshake->advance(newcomer.socket.fd())) {
      case State::open:
        return false;
      case State::closed:
        return true;
      case State::proved:
        newcomer.handshake.reset();
        newcomer.silence = Deadline(hello_timeout_);
        return false;
      case State::other_program:
        refuse(newcomer, "it does not speak as a launcher of this version");
        return true;
      case State::other_key:
        refuse(
            newcomer,
            format(
                "it has another token than {}; if it is a host of this job, "
                "give it the same token, as a file with mode 0600",
                token_.source));
        return true;
    }
    return true;
  }

  // Reads a newcomer's hello. True when it was admitted or refused, false while
  // its line is not complete.
  bool admit(Node& newcomer) {
    std::string line;
    switch (receive(newcomer.socket.fd(), newcomer.unread, line)) {
      case Received::nothing:
        return false;
      case Received::end:
        newcomer.socket = FileDescriptor();
        return true;
      case Received::line:
        break;
    }
    std::string reason;
    try {
      reason = take_hello(newcomer, json::parse(line));
    } catch (const json::exception&) {
      reason = kNoLauncher;
    }
    if (!reason.empty()) {
      refuse(newcomer, reason);
      return true;
    }
    nodes_[newcomer.node] = std::move(newcomer);
    return true;
  }

  std::string take_hello(Node& newcomer, const json& hello) const {
    const json& nodes = hello.at("nodes");
    const json& node = hello.at("node_rank");
    const json& ranks = hello.at("ranks");
    if (hello.at("protocol") != kProtocol) {
      return "it is another version of the launcher";
    }
    if (!nodes.is_number() || !node.is_number() || !ranks.is_number()) {
      return kNoLauncher;
    }
    if (!is_integer(nodes, options_.num_nodes, options_.num_nodes)) {
      return format(
          "node 0 has --nnodes {}, this one has {}", options_.num_nodes,
          nodes.dump());
    }
    if (!is_integer(node, 1, options_.num_nodes - 1)) {
      return format(
          "--node-rank {} is out of range: with --nnodes {} it is 1 to {}",
          node.dump(), options_.num_nodes, options_.num_nodes - 1);
    }
    if (!is_integer(ranks, 1, kMaxRanksPerHost)) {
      return format(
          "{} ranks on one host are out of range: it is 1 to {}", ranks.dump(),
          kMaxRanksPerHost);
    }
    newcomer.node = node;
    newcomer.num_ranks = ranks;
    if (nodes_[newcomer.node].socket.fd() >= 0) {
      return format(
          "another host, {}, already has --node-rank {}",
          address_of(nodes_[newcomer.node].socket.fd(), true), newcomer.node);
    }
    return "";
  }

  Rendezvous assign_ranks() {
    listener_ = FileDescriptor();
    Rendezvous result;
    result.start.place.job = random_job_id();
    result.start.place.master_addr = address_;
    result.start.place.master_port = port_of(options_);
    result.start.place.node_address = address_;
    result.start.place.store_key = store_key(token_, result.start.place.job);
    result.start.world_size = options_.num_ranks;
    for (const Node& node : nodes_) result.start.world_size += node.num_ranks;
    if (options_.listen_early) listen(store_.fd(), 1024);
    result.start.master = std::move(store_);
    result.start.claim = std::move(claim_);
    int first_rank = options_.num_ranks;
    for (int node = 1; node < options_.num_nodes; ++node) {
      Node& admitted = nodes_[node];
      send_line(
          admitted.socket.fd(), {{"job", result.start.place.job},
                                 {"generation", result.start.place.generation},
                                 {"first_rank", first_rank},
                                 {"world_size", result.start.world_size}});
      first_rank += admitted.num_ranks;
      const std::string address = address_of(admitted.socket.fd(), true);
      result.links.push_back(
          {std::move(admitted.socket), node, address, admitted.unread});
    }
    return result;
  }

  const LaunchOptions& options_;
  const Token& token_;
  const milliseconds proof_timeout_;
  const milliseconds hello_timeout_;
  authentication::Strangers strangers_;
  FileDescriptor listener_;
  FileDescriptor store_;
  FileDescriptor claim_;
  std::string address_;
  std::vector<Node> newcomers_;  // in the order in which they came
  std::vector<Node> nodes_;      // by node; [0] stays empty
};

// One attempt to connect; sets `error`.
FileDescriptor try_connect(const addrinfo& target, int timeout_ms, int& error) {
  FileDescriptor link(
      socket(target.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  error = 0;
  if (connect(link.fd(), target.ai_addr, target.ai_addrlen) == 0) return link;
  error = errno;
  if (error == EINPROGRESS) {
    pollfd file{link.fd(), POLLOUT, 0};
    if (poll(&file, 1, timeout_ms) != 1) {
      error = ETIMEDOUT;
      return FileDescriptor();
    }
    socklen_t size = sizeof error;
    getsockopt(link.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
  }
  return error == 0 ? std::move(link) : FileDescriptor();
}

FileDescriptor
connect_to_host(const LaunchOptions& options, const Deadline& deadline) {
  const auto target = resolve(options.master_addr, port_of(options));
  const std::string place = place_of(options);
  Notice notice;
  for (int error = 0;;) {
    FileDescriptor link =
        try_connect(*target, deadline.left_ms(milliseconds(2000)), error);
    if (link.fd() >= 0) return link;
    if (deadline.passed() || error == ENETUNREACH || error == EACCES) {
      throw ConfigError(format(
          "[launch] node 0 does not answer at {}: {}; is the launcher with "
          "--node-rank 0 running there, and the port open between the hosts?",
          place, std::strerror(error)));
    }
    notice.show(format("node 0 at {} ({})", place, std::strerror(error)));
    poll(nullptr, 0, deadline.left_ms(milliseconds(100)));
  }
}

// A connection to node 0, which has proved the token.
FileDescriptor join(
    const LaunchOptions& options, const Token& token,
    const Deadline& deadline) {
  const std::string place = place_of(options);
  const Deadline retries(std::min(kMaxRetries, options.join_timeout));
  for (;;) {
    FileDescriptor link = connect_to_host(options, deadline);
    enable_keepalive(link.fd());
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
          "launcher of this job, or too many others connect there; give "
          "another --master-port",
          place));
    }
    poll(nullptr, 0, deadline.left_ms(milliseconds(100)));
  }
}

}  // namespace

Rendezvous host_rendezvous(const LaunchOptions& options, const Token& token) {
  return RendezvousHost(options, token).run();
}

Rendezvous join_rendezvous(const LaunchOptions& options, const Token& token) {
  const Deadline deadline(options.join_timeout);
  FileDescriptor link = join(options, token, deadline);
  send_line(
      link.fd(), {{"protocol", kProtocol},
                  {"nodes", options.num_nodes},
                  {"node_rank", options.node_rank},
                  {"ranks", options.num_ranks}});
  const std::string place = place_of(options);
  std::string unread;
  std::string line;
  Notice notice;
  for (Received received = Received::nothing; received == Received::nothing;) {
    if (deadline.passed()) {
      throw ConfigError(format(
          "[launch] node 0 at {} did not start the job within {}; it waits for "
          "other nodes, or another program has that port",
          place, deadline.seconds()));
    }
    notice.show(format("node 0 at {}, which waits for other nodes", place));
    pollfd file{link.fd(), POLLIN, 0};
    poll(&file, 1, deadline.left_ms(milliseconds(500)));
    received = receive(link.fd(), unread, line);
    if (received == Received::end) {
      throw ConfigError(format(
          "[launch] what answers at {} is not the launcher of this job, or it "
          "ended; give another --master-port",
          place));
    }
  }
  const json start = json::parse(line, nullptr, false);
  if (start.is_object() && start.contains("refused")) {
    throw ConfigError(format(
        "[launch] node 0 at {} does not take this host: {}", place,
        start["refused"].dump()));
  }
  try {
    Rendezvous result;
    result.start.place.job = start.at("job");
    result.start.place.generation = start.at("generation");
    result.start.place.master_addr = address_of(link.fd(), true);
    result.start.place.master_port = port_of(options);
    result.start.place.node_address = address_of(link.fd(), false);
    result.start.place.store_key = store_key(token, result.start.place.job);
    result.start.first_rank = start.at("first_rank");
    result.start.world_size = start.at("world_size");
    const std::string address = result.start.place.master_addr;
    result.links.push_back({std::move(link), 0, address, unread});
    return result;
  } catch (const json::exception&) {
    throw ConfigError(format(
        "[launch] what answers at {} is not a launcher; give another "
        "--master-port",
        place));
  }
}

}  // namespace echelon::launch
