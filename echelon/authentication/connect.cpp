#include "echelon/authentication/connect.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>

namespace echelon::authentication {

Addresses numeric_address(const std::string& number, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (getaddrinfo(
          number.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
    errno = EINVAL;
    found = nullptr;
  }
  return {found, freeaddrinfo};
}

FileDescriptor begin_connect(const addrinfo& target) {
  FileDescriptor socket(::socket(
      target.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.is_open()) return socket;
  if (connect(socket.fd(), target.ai_addr, target.ai_addrlen) != 0 &&
      errno != EINPROGRESS) {
    const int error = errno;
    socket.close();
    errno = error;
  }
  return socket;
}

int finish_connect(int fd, std::chrono::milliseconds limit) {
  pollfd file{fd, POLLOUT, 0};
  if (poll(&file, 1, static_cast<int>(limit.count())) != 1) return ETIMEDOUT;
  int error = 0;
  socklen_t size = sizeof error;
  return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0 ? error
                                                                  : errno;
}

FileDescriptor
connect_within(const addrinfo& target, std::chrono::milliseconds limit) {
  FileDescriptor socket = begin_connect(target);
  if (!socket.is_open()) return socket;
  const int error = finish_connect(socket.fd(), limit);
  if (error == 0) return socket;
  socket.close();
  errno = error;
  return socket;
}

}  // namespace echelon::authentication
