#include "echelon/launch/meeting.h"

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
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "echelon/error.h"
#include "echelon/launch/checks.h"
#include "echelon/launch/hosts.h"

namespace echelon::launch {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Raised when what the launchers say to each other changes.
constexpr int kProtocol = 1;
constexpr size_t kMaxMessage = 64 << 10;
constexpr milliseconds kPatience{3000};  // before the user is told to wait

/// A file descriptor with an owner.
class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() {
    if (fd_ >= 0) {
      close(fd_);
    }
  }
  int fd() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

class Deadline {
 public:
  explicit Deadline(milliseconds span) : span_(span) {}
  bool passed() const { return steady_clock::now() >= begin_ + span_; }
  int left_ms(milliseconds at_most) const {
    const auto left =
        std::chrono::ceil<milliseconds>(begin_ + span_ - steady_clock::now());
    return static_cast<int>(std::clamp(left, milliseconds(0), at_most).count());
  }
  std::string seconds() const {
    const auto tenths = span_.count() / 100;
    return std::to_string(tenths / 10) +
           (tenths % 10 != 0 ? "." + std::to_string(tenths % 10) : "") + " s";
  }

 private:
  steady_clock::time_point begin_ = steady_clock::now();
  milliseconds span_;
};

std::string name_of(const sockaddr_storage& address) {
  char host[NI_MAXHOST] = "?";
  getnameinfo(
      reinterpret_cast<const sockaddr*>(&address), sizeof address, host,
      sizeof host, nullptr, 0, NI_NUMERICHOST);
  return host;
}

std::string address_of(int fd, bool peer) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  auto* raw = reinterpret_cast<sockaddr*>(&address);
  return (peer ? getpeername(fd, raw, &size) : getsockname(fd, raw, &size)) == 0
             ? name_of(address)
             : "?";
}

// A host that loses power or its cable says no goodbye.
void notice_silence(int fd) {
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

enum class Heard { nothing, line, end };

// Adds what has come to `unread` and takes one line out of it.
Heard hear(int fd, std::string& unread, std::string& line) {
  char bytes[4096];
  const ssize_t size = recv(fd, bytes, sizeof bytes, MSG_DONTWAIT);
  if (size > 0) {
    unread.append(bytes, size);
  }
  const size_t end = unread.find('\n');
  if (end != std::string::npos) {
    line = unread.substr(0, end);
    unread.erase(0, end + 1);
    return Heard::line;
  }
  const bool waits =
      size > 0 || (size < 0 && (errno == EAGAIN || errno == EINTR));
  return waits && unread.size() < kMaxMessage ? Heard::nothing : Heard::end;
}

std::string place_of(const LaunchOptions& options, int port) {
  return options.master_addr + ", port " + std::to_string(port);
}

int port_of(const LaunchOptions& options) {
  return options.master_port != 0 ? options.master_port : kDefaultMasterPort;
}

/// Node 0's side while the others come.
class Reception {
 public:
  explicit Reception(const LaunchOptions& options)
      : options_(options), guests_(options.num_nodes) {}

  Meeting run() {
    open();
    const Deadline patience(kPatience);
    const Deadline deadline(options_.join_timeout);
    bool told = false;
    while (!missing().empty()) {
      if (deadline.passed()) {
        throw ConfigError(
            "[launch] after " + deadline.seconds() + " " + missing() + " of " +
            std::to_string(options_.num_nodes) + " had not come to " +
            place_of(options_, port_of(options_)) +
            "; start the launcher there with the same --nnodes, --master-addr "
            "and --master-port");
      }
      if (!told && patience.passed()) {
        told = true;
        std::fprintf(
            stderr, "echelon: waiting for %s at %s\n", missing().c_str(),
            place_of(options_, port_of(options_)).c_str());
      }
      wait(deadline.left_ms(milliseconds(500)));
    }
    return seat();
  }

 private:
  struct Guest {
    Socket socket;
    std::string unread;
    int num_ranks = 0;
    int node = -1;
  };

  // Two sockets on one port: one to meet at, one for the store afterwards.
  // Neither listens while the other is bound, so both may be.
  void open() {
    const BoundSocket door =
        bind_master(options_.master_addr, port_of(options_));
    door_ = Socket(door.fd);
    address_ = door.address;
    refuse_loopback_name();
    claim_ = Socket(claim_port(door.address, door.port));
    store_ = Socket(bind_master(door.address, door.port).fd);
    if (listen(door_.fd(), 1024) != 0) {
      throw ConfigError(
          "[launch] master " + place_of(options_, door.port) +
          ": the port is in use (" + std::strerror(errno) +
          "); give another --master-port");
    }
  }

  // /etc/hosts often maps a host's own name to 127.0.1.1.
  void refuse_loopback_name() const {
    in_addr ignored;
    if (address_.rfind("127.", 0) == 0 && options_.master_addr != "localhost" &&
        inet_pton(AF_INET, options_.master_addr.c_str(), &ignored) != 1) {
      throw ConfigError(
          "[launch] --master-addr " + options_.master_addr + " is " + address_ +
          " on this host, which no other host reaches; give the "
          "number of its address");
    }
  }

  std::string missing() const {
    std::string text;
    int count = 0;
    for (int node = 1; node < options_.num_nodes; ++node) {
      if (guests_[node].socket.fd() < 0) {
        text += (count++ == 0 ? "" : ", ") + std::to_string(node);
      }
    }
    return text.empty() ? text : (count == 1 ? "node " : "nodes ") + text;
  }

  void wait(int timeout_ms) {
    std::vector<pollfd> files = {{door_.fd(), POLLIN, 0}};
    for (const Guest& guest : arriving_) {
      files.push_back({guest.socket.fd(), POLLIN, 0});
    }
    for (const Guest& guest : guests_) {
      files.push_back({guest.socket.fd(), POLLIN, 0});
    }
    poll(files.data(), files.size(), timeout_ms);
    for (size_t i = 0; i < guests_.size(); ++i) {
      if (files[1 + arriving_.size() + i].revents != 0) {
        // One who has a seat says nothing before all have come: it left.
        guests_[i] = Guest();
      }
    }
    std::vector<Guest> still;
    for (size_t i = 0; i < arriving_.size(); ++i) {
      if (files[1 + i].revents == 0 || !admit(arriving_[i])) {
        if (arriving_[i].socket.fd() >= 0) {
          still.push_back(std::move(arriving_[i]));
        }
      }
    }
    arriving_ = std::move(still);
    if (files[0].revents != 0) {
      Guest guest;
      guest.socket =
          Socket(accept4(door_.fd(), nullptr, nullptr, SOCK_CLOEXEC));
      if (guest.socket.fd() >= 0) {
        notice_silence(guest.socket.fd());
        arriving_.push_back(std::move(guest));
      }
    }
  }

  // True when the guest has a seat or was sent away.
  bool admit(Guest& guest) {
    std::string line;
    switch (hear(guest.socket.fd(), guest.unread, line)) {
      case Heard::nothing:
        return false;
      case Heard::end:
        guest.socket = Socket();
        return true;
      case Heard::line:
        break;
    }
    std::string reason;
    try {
      reason = take_hello(guest, json::parse(line));
    } catch (const json::exception&) {
      reason = "it does not speak as a launcher";
    }
    if (!reason.empty()) {
      send_line(guest.socket.fd(), {{"refused", reason}});
      guest.socket = Socket();
      return true;
    }
    guests_[guest.node] = std::move(guest);
    return true;
  }

  std::string take_hello(Guest& guest, const json& hello) const {
    const int nodes = hello.at("nodes");
    guest.node = hello.at("node_rank");
    guest.num_ranks = hello.at("ranks");
    const auto text = [](int value) { return std::to_string(value); };
    if (hello.at("protocol") != kProtocol) {
      return "it is another version of the launcher";
    }
    if (nodes != options_.num_nodes) {
      return "node 0 has --nnodes " + text(options_.num_nodes) +
             ", this one has " + text(nodes);
    }
    if (guest.node < 1 || guest.node >= options_.num_nodes ||
        guest.num_ranks < 1) {
      return "--node-rank " + text(guest.node) + " with " +
             text(guest.num_ranks) + " ranks is out of range";
    }
    if (guests_[guest.node].socket.fd() >= 0) {
      return "another host, " +
             address_of(guests_[guest.node].socket.fd(), true) +
             ", already has --node-rank " + text(guest.node);
    }
    return "";
  }

  Meeting seat() {
    door_ = Socket();
    Meeting meeting;
    meeting.start.place.job = random_job_id();
    meeting.start.place.master_addr = address_;
    meeting.start.place.master_port = port_of(options_);
    meeting.start.place.node_address = address_;
    meeting.start.world_size = options_.num_ranks;
    for (const Guest& guest : guests_) {
      meeting.start.world_size += guest.num_ranks;
    }
    if (options_.listen_early) {
      listen(store_.fd(), 1024);
    }
    meeting.start.master_fd = store_.release();
    meeting.start.claim_fd = claim_.release();
    int first_rank = options_.num_ranks;
    for (int node = 1; node < options_.num_nodes; ++node) {
      Guest& guest = guests_[node];
      send_line(
          guest.socket.fd(), {{"job", meeting.start.place.job},
                              {"generation", meeting.start.place.generation},
                              {"first_rank", first_rank},
                              {"world_size", meeting.start.world_size}});
      first_rank += guest.num_ranks;
      const std::string address = address_of(guest.socket.fd(), true);
      meeting.links.push_back(
          {guest.socket.release(), node, address, guest.unread});
    }
    return meeting;
  }

  const LaunchOptions& options_;
  Socket door_;
  Socket store_;
  Socket claim_;
  std::string address_;
  std::vector<Guest> arriving_;
  std::vector<Guest> guests_;  // by node; [0] stays empty
};

using AddressList = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

AddressList resolve(const LaunchOptions& options) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int failure = getaddrinfo(
      options.master_addr.c_str(), std::to_string(port_of(options)).c_str(),
      &hints, &found);
  if (failure != 0) {
    throw ConfigError(
        "[launch] master address \"" + options.master_addr +
        "\": " + gai_strerror(failure) + "; give its number");
  }
  return {found, freeaddrinfo};
}

// One try; the error is left in `error`.
Socket try_connect(const addrinfo& target, int timeout_ms, int& error) {
  Socket link(
      socket(target.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  error = 0;
  if (connect(link.fd(), target.ai_addr, target.ai_addrlen) == 0) {
    return link;
  }
  error = errno;
  if (error == EINPROGRESS) {
    pollfd file{link.fd(), POLLOUT, 0};
    if (poll(&file, 1, timeout_ms) != 1) {
      error = ETIMEDOUT;
      return Socket();
    }
    socklen_t size = sizeof error;
    getsockopt(link.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
  }
  return error == 0 ? std::move(link) : Socket();
}

Socket knock(const LaunchOptions& options, const Deadline& deadline) {
  const AddressList target = resolve(options);
  const std::string place = place_of(options, port_of(options));
  const Deadline patience(kPatience);
  bool told = false;
  for (int error = 0;;) {
    Socket link =
        try_connect(*target, deadline.left_ms(milliseconds(2000)), error);
    if (link.fd() >= 0) {
      return link;
    }
    if (deadline.passed() || error == ENETUNREACH || error == EACCES) {
      throw ConfigError(
          "[launch] node 0 does not answer at " + place + ": " +
          std::strerror(error) +
          "; is the launcher with --node-rank 0 running there, "
          "and the port open between the hosts?");
    }
    if (!told && patience.passed()) {
      told = true;
      std::fprintf(
          stderr, "echelon: waiting for node 0 at %s (%s)\n", place.c_str(),
          std::strerror(error));
    }
    poll(nullptr, 0, deadline.left_ms(milliseconds(100)));
  }
}

}  // namespace

Meeting host_meeting(const LaunchOptions& options) {
  return Reception(options).run();
}

Meeting join_meeting(const LaunchOptions& options) {
  const Deadline deadline(options.join_timeout);
  Socket link = knock(options, deadline);
  notice_silence(link.fd());
  send_line(
      link.fd(), {{"protocol", kProtocol},
                  {"nodes", options.num_nodes},
                  {"node_rank", options.node_rank},
                  {"ranks", options.num_ranks}});
  const std::string place = place_of(options, port_of(options));
  std::string unread;
  std::string line;
  const Deadline patience(kPatience);
  bool told = false;
  for (Heard heard = Heard::nothing; heard == Heard::nothing;) {
    if (deadline.passed()) {
      throw ConfigError(
          "[launch] node 0 at " + place + " did not start the job within " +
          deadline.seconds() +
          "; it waits for other nodes, or another program has "
          "that port");
    }
    if (!told && patience.passed()) {
      told = true;
      std::fprintf(
          stderr,
          "echelon: waiting for node 0 at %s, which waits for "
          "other nodes\n",
          place.c_str());
    }
    pollfd file{link.fd(), POLLIN, 0};
    poll(&file, 1, deadline.left_ms(milliseconds(500)));
    heard = hear(link.fd(), unread, line);
    if (heard == Heard::end) {
      throw ConfigError(
          "[launch] what answers at " + place +
          " is not the launcher of this job, or it ended; give "
          "another --master-port");
    }
  }
  const json start = json::parse(line, nullptr, false);
  if (start.is_object() && start.contains("refused")) {
    throw ConfigError(
        "[launch] node 0 at " + place +
        " does not take this host: " + start["refused"].dump());
  }
  try {
    Meeting meeting;
    meeting.start.place.job = start.at("job");
    meeting.start.place.generation = start.at("generation");
    meeting.start.place.master_addr = address_of(link.fd(), true);
    meeting.start.place.master_port = port_of(options);
    meeting.start.place.node_address = address_of(link.fd(), false);
    meeting.start.first_rank = start.at("first_rank");
    meeting.start.world_size = start.at("world_size");
    const std::string address = meeting.start.place.master_addr;
    meeting.links.push_back({link.release(), 0, address, unread});
    return meeting;
  } catch (const json::exception&) {
    throw ConfigError(
        "[launch] what answers at " + place +
        " is not a launcher; give another --master-port");
  }
}

}  // namespace echelon::launch
