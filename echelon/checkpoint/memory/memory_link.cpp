#include "echelon/checkpoint/memory/memory_link.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "echelon/authentication/connect.h"
#include "echelon/authentication/handshake.h"
#include "echelon/authentication/strangers.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"

namespace echelon::memory_slots {
namespace {

constexpr size_t kLongestLine = 4096;
constexpr size_t kPiece = 1 << 20;

}  // namespace

MemoryLink::MemoryLink(
    const std::string& address, int port, const authentication::Key& key)
    : peer_(format("{}, port {}", address, port)) {
  const auto target = authentication::numeric_address(address, port);
  if (!target) fail("it is no address");
  const auto deadline = std::chrono::steady_clock::now() + kSilence;
  FileDescriptor socket;
  auto state = authentication::State::closed;
  // A server closes connections to make room, and takes them again.
  for (int attempt = 0; attempt < 5 && state == authentication::State::closed;
       ++attempt) {
    socket = authentication::connect_within(*target, kSilence);
    if (!socket.is_open()) fail(std::strerror(errno));
    state = authentication::prove(
        socket.fd(), key, authentication::Port::memory, deadline);
  }
  if (state != authentication::State::proved) {
    fail("it did not prove that it belongs to this job");
  }
  set_limits(socket.fd());
  channel_ = authentication::Channel(
      std::move(socket), key, authentication::Handshake::End::client);
}

MemoryLink::MemoryLink(FileDescriptor socket, const authentication::Key& key)
    : peer_(authentication::address_of(socket.fd(), /*peer=*/true)) {
  set_limits(socket.fd());
  channel_ = authentication::Channel(
      std::move(socket), key, authentication::Handshake::End::server);
}

void MemoryLink::fail(const std::string& what) const {
  throw CheckpointError(format("the host at {}: {}", peer_, what));
}

void MemoryLink::set_limits(int socket) {
  fcntl(socket, F_SETFL, 0);
  const timeval limit{.tv_sec = kSilence.count(), .tv_usec = 0};
  setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  const int yes = 1;
  const auto unanswered_ms =
      static_cast<unsigned>(std::chrono::milliseconds(kSilence).count());
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof yes);
  // A host that is cut off does not close its connections.
  const int idle_s = static_cast<int>(kSilence.count());
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  setsockopt(
      socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &unanswered_ms,
      sizeof unanswered_ms);
}

void MemoryLink::send(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = channel_.send(bytes.data(), bytes.size());
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) fail(std::strerror(errno));
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
}

void MemoryLink::send_file(int file, int64_t offset, int64_t bytes) {
  std::vector<char> piece(
      static_cast<size_t>(std::min<int64_t>(bytes, kPiece)));
  while (bytes > 0) {
    const ssize_t got = pread(
        file, piece.data(),
        static_cast<size_t>(std::min<int64_t>(bytes, kPiece)), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) fail(got == 0 ? "the file is cut off" : strerror(errno));
    send({piece.data(), static_cast<size_t>(got)});
    offset += got;
    bytes -= got;
  }
}

void MemoryLink::receive(std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t got = channel_.receive(bytes.data(), bytes.size());
    if (got < 0 && errno == EINTR) continue;
    if (got == 0) fail("it has closed the connection");
    if (got < 0) fail(errno == EAGAIN ? "it is silent" : strerror(errno));
    bytes = bytes.subspan(static_cast<size_t>(got));
  }
}

// Lines are short and few.
std::string MemoryLink::receive_line() {
  std::string line;
  for (;;) {
    std::byte next{};
    receive({&next, 1});
    if (next == std::byte{'\n'}) return line;
    line += static_cast<char>(next);
    if (line.size() > kLongestLine) fail("it has sent a line that is too long");
  }
}

void MemoryLink::receive_file(int file, int64_t bytes) {
  std::vector<std::byte> piece(
      static_cast<size_t>(std::min<int64_t>(bytes, kPiece)));
  while (bytes > 0) {
    const auto part = std::span(piece).first(
        static_cast<size_t>(std::min<int64_t>(bytes, kPiece)));
    receive(part);
    std::string_view text(
        reinterpret_cast<const char*>(part.data()), part.size());
    if (const int error = write_all(file, text); error != 0) {
      fail(std::string("writing a copy failed: ") + std::strerror(error));
    }
    bytes -= static_cast<int64_t>(part.size());
  }
}

bool MemoryLink::wait() {
  if (channel_.has_unread()) return true;
  char next = 0;
  for (;;) {
    pollfd file{channel_.fd(), POLLIN, 0};
    if (poll(&file, 1, -1) < 0) {
      if (errno == EINTR) continue;
      return false;
    }
    return recv(channel_.fd(), &next, 1, MSG_PEEK) > 0;
  }
}

int64_t MemoryLink::ask(const std::string& request) {
  send(request + "\n");
  return answer();
}

int64_t MemoryLink::answer() {
  const std::string line = receive_line();
  if (!line.starts_with("ok ")) fail(line);
  return std::strtoll(line.c_str() + 3, nullptr, 10);
}

}  // namespace echelon::memory_slots
