#include "echelon/launch/control.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "echelon/error.h"
#include "echelon/launch/job_start.h"
#include "echelon/text/format.h"

namespace echelon::launch {
namespace {

constexpr size_t kMostBytes = 4096;
// A program that has connected sends at once.
constexpr int kRequestMs = 100;
// A resize may count the model's layers first.
constexpr time_t kAnswerSeconds = 600;

bool is_of(int socket, uid_t user) {
  ucred other{};
  socklen_t size = sizeof other;
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &other, &size) == 0 &&
         (other.uid == user || other.uid == 0);
}

std::string receive(int socket) {
  std::array<char, kMostBytes> bytes;
  ssize_t size;
  do {
    size = recv(socket, bytes.data(), bytes.size(), 0);
  } while (size < 0 && errno == EINTR);
  return size > 0 ? std::string(bytes.data(), static_cast<size_t>(size)) : "";
}

}  // namespace

ControlSocket::ControlSocket(const std::string& name)
    : socket_(
          socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
  const auto [address, size] = abstract_address(name);
  if (!socket_.is_open() ||
      bind(socket_.fd(), reinterpret_cast<const sockaddr*>(&address), size) !=
          0 ||
      listen(socket_.fd(), 16) != 0) {
    throw ConfigError(
        format("[launch] control socket @{}: {}", name, std::strerror(errno)));
  }
}

void ControlSocket::serve(
    const std::function<std::string(const std::string&)>& answer) {
  const FileDescriptor client(
      accept4(socket_.fd(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!client.is_open() || !is_of(client.fd(), geteuid())) return;
  pollfd file{client.fd(), POLLIN, 0};
  if (poll(&file, 1, kRequestMs) != 1) return;
  const std::string request = receive(client.fd());
  if (request.empty()) return;
  const std::string text = answer(request);
  (void)!send(
      client.fd(), text.data(), std::min(text.size(), kMostBytes),
      MSG_NOSIGNAL | MSG_DONTWAIT);
}

std::string
ask_job(const std::string& name, const std::string& request, uid_t user) {
  const FileDescriptor server(
      socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  const auto [address, size] = abstract_address(name);
  const timeval limit{kAnswerSeconds, 0};
  if (!server.is_open() ||
      setsockopt(server.fd(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) !=
          0 ||
      connect(server.fd(), reinterpret_cast<const sockaddr*>(&address), size) !=
          0 ||
      !is_of(server.fd(), user)) {
    return "";
  }
  if (send(server.fd(), request.data(), request.size(), MSG_NOSIGNAL) < 0) {
    return "";
  }
  const std::string text = receive(server.fd());
  if (text.empty()) {
    throw Error(format(
        "the job did not answer \"{}\": {}", request, std::strerror(errno)));
  }
  return text;
}

}  // namespace echelon::launch
