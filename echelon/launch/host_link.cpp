#include "echelon/launch/host_link.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "echelon/authentication/connect.h"
#include "echelon/authentication/strangers.h"
#include "echelon/launch/job_start.h"
#include "echelon/text/format.h"

namespace echelon::launch {
namespace {

using authentication::Handshake;
using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr size_t kMaxMessage = 64 << 10;
constexpr size_t kMostUnsent = 8 << 20;  // the places of 65,536 hosts are 3 MiB
constexpr int kMostReads = 64;           // of a link in a turn
constexpr milliseconds kConnectTimeout{1000};
constexpr milliseconds kAnswerTimeout{2000};

std::atomic<uint64_t> sent_messages{0};
std::atomic<uint64_t> sent_bytes{0};
std::atomic<uint64_t> begun_calls{0};

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

bool is_ready(int fd, short events) {
  pollfd file{fd, events, 0};
  return poll(&file, 1, 0) == 1;
}

FileDescriptor begin_connect(const Endpoint& place) {
  const auto target =
      authentication::numeric_address(place.address, place.port);
  return target ? authentication::begin_connect(*target) : FileDescriptor();
}

}  // namespace

int Deadline::left_ms(milliseconds at_most) const {
  const auto left =
      std::chrono::ceil<milliseconds>(end() - steady_clock::now());
  return static_cast<int>(std::clamp(left, milliseconds(0), at_most).count());
}

std::string Deadline::seconds() const {
  const auto tenths = span_.count() / 100;
  return tenths % 10 == 0 ? format("{} s", tenths / 10)
                          : format("{}.{} s", tenths / 10, tenths % 10);
}

void tell_user(const std::string& text) {
  std::fprintf(stderr, "echelon: %s\n", text.c_str());
}

void Notice::show(const std::string& awaited) {
  if (told_ || !silence_.passed()) return;
  told_ = true;
  tell_user("waiting for " + awaited);
}

LinkTraffic link_traffic() {
  return {sent_messages, sent_bytes, begun_calls};
}

HostLink::HostLink(
    FileDescriptor socket, const authentication::Key& key, Handshake::End end)
    : address_(authentication::address_of(socket.fd(), true)),
      own_address_(authentication::address_of(socket.fd(), false)) {
  enable_keepalive(socket.fd());
  fcntl(socket.fd(), F_SETFL, O_NONBLOCK);
  channel_ = authentication::Channel(std::move(socket), key, end);
}

bool HostLink::say(const json& message) {
  return say_lines(
      message.dump(-1, ' ', false, json::error_handler_t::replace) + "\n");
}

bool HostLink::say_lines(const std::string& lines) {
  if (!is_open() || unsent_.size() >= kMostUnsent) return false;
  sent_messages += static_cast<uint64_t>(std::ranges::count(lines, '\n'));
  sent_bytes += lines.size();
  unsent_ += lines;
  return flush();
}

// Sends what can be sent. False when the connection is broken.
bool HostLink::flush() {
  while (!unsent_.empty()) {
    const ssize_t size = channel_.send(unsent_.data(), unsent_.size());
    if (size <= 0) return size < 0 && (errno == EAGAIN || errno == EINTR);
    sent_ = true;
    unsent_.erase(0, static_cast<size_t>(size));
  }
  return true;
}

// Before the first byte is sent, encryption may wait for the other end's.
short HostLink::events() const {
  return static_cast<short>(
      sent_ && !unsent_.empty() ? POLLIN | POLLOUT : POLLIN);
}

bool HostLink::receive() {
  char bytes[4096];
  bool more = true;
  for (int i = 0; i < kMostReads && more; ++i) {
    const ssize_t size = channel_.receive(bytes, sizeof bytes);
    if (size < 0 && errno != EAGAIN && errno != EINTR) return false;
    if (size == 0) return false;
    if (size < 0) break;
    hear_now();
    unread_.append(bytes, static_cast<size_t>(size));
    more = channel_.has_unread() || size == sizeof bytes;
  }
  if (!flush()) return false;
  return unread_.size() < kMaxMessage ||
         unread_.find('\n') != std::string::npos;
}

std::optional<json> HostLink::take() {
  const size_t end = unread_.find('\n');
  if (end == std::string::npos) return std::nullopt;
  json message = json::parse(
      unread_.begin(), unread_.begin() + static_cast<std::ptrdiff_t>(end),
      nullptr, false);
  unread_.erase(0, end + 1);
  return message.is_discarded() ? json() : message;
}

Call::Call(
    const Endpoint& place, const authentication::Key& key, std::string hello)
    : place_(place),
      hello_(std::move(hello)),
      deadline_(kConnectTimeout),
      socket_(begin_connect(place)),
      key_(key),
      handshake_(key, authentication::Port::launchers, Handshake::End::client) {
  if (!socket_.is_open()) error_ = errno;
  ++begun_calls;
}

short Call::events() const {
  return socket_.is_open() && !connected_ ? POLLOUT : POLLIN;
}

Call::State Call::advance() {
  if (error_ != 0) {
    return error_ == ECONNREFUSED ? State::refused : State::failed;
  }
  if (!connected_) {
    if (!is_ready(fd(), POLLOUT)) {
      return deadline_.passed() ? State::failed : State::open;
    }
    error_ = authentication::finish_connect(fd(), milliseconds(0));
    if (error_ != 0) return advance();
    connected_ = true;
    deadline_ = Deadline(kAnswerTimeout);
  }
  if (!link_.is_open()) {
    const auto state = handshake_.advance(fd());
    if (state == authentication::State::open) {
      return deadline_.passed() ? State::failed : State::open;
    }
    if (state != authentication::State::proved) return State::failed;
    link_ = HostLink(std::move(socket_), key_, Handshake::End::client);
    link_.say(json::parse(hello_));
  }
  const bool open = link_.receive();
  if (const auto answer = link_.take()) {
    answer_ = answer->dump();
    return State::answered;
  }
  return open && !deadline_.passed() ? State::open : State::failed;
}

}  // namespace echelon::launch
