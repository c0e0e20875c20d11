#include "echelon/monitoring/listen.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::monitoring {
namespace {

// An address, and the option that it is of.
struct Asked {
  const std::string& address;
  const char* option;

  [[noreturn]] void refuse(const std::string& why) const {
    throw ConfigError(format("{} {}: {}", option, address, why));
  }
};

struct HostAndPort {
  std::string host;
  std::string port;
};

HostAndPort split(const Asked& asked) {
  const std::string& address = asked.address;
  const size_t colon = address.rfind(':');
  HostAndPort parts{"127.0.0.1", address};
  if (colon != std::string::npos) {
    parts = {address.substr(0, colon), address.substr(colon + 1)};
  }
  std::string& host = parts.host;
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string::npos) {
    asked.refuse("an IPv6 address is in brackets, as [::1]:9464");
  }
  char* end = nullptr;
  const long port = std::strtol(parts.port.c_str(), &end, 10);
  if (host.empty() || parts.port.empty() || *end != '\0' || port < 1 ||
      port > 65535) {
    asked.refuse(
        "it is HOST:PORT, with a port from 1 to 65535, as 127.0.0.1:9464");
  }
  return parts;
}

bool is_loopback(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    const auto* four = reinterpret_cast<const sockaddr_in*>(address);
    return (ntohl(four->sin_addr.s_addr) >> 24) == 127;
  }
  const auto* six = reinterpret_cast<const sockaddr_in6*>(address);
  return address->sa_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&six->sin6_addr) != 0;
}

}  // namespace

Listening listen_at(
    const std::string& address, const char* option,
    std::chrono::milliseconds patience) {
  const Asked asked{address, option};
  const auto [host, port] = split(asked);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int failure = getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
  if (failure != 0) asked.refuse(gai_strerror(failure));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(
      found, freeaddrinfo);
  Listening listening{
      FileDescriptor(socket(
          found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)),
      address.find(':') == std::string::npos ? "127.0.0.1:" + address : address,
      is_loopback(found->ai_addr)};
  const int fd = listening.socket.fd();
  const int yes = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  const auto until = std::chrono::steady_clock::now() + patience;
  while (fd < 0 || bind(fd, found->ai_addr, found->ai_addrlen) != 0 ||
         listen(fd, 64) != 0) {
    const int error = errno;
    if (error == EADDRINUSE && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      continue;
    }
    asked.refuse(
        error == EADDRINUSE
            ? "the port is in use; give another one, or `ss -ltnp` tells by "
              "whom"
            : std::strerror(error));
  }
  return listening;
}

}  // namespace echelon::monitoring
