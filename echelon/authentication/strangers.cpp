#include "echelon/authentication/strangers.h"

#include <netdb.h>
#include <sys/socket.h>

#include <cstddef>
#include <cstdio>

namespace echelon::authentication {
namespace {

constexpr size_t kMostTold = 8;

}  // namespace

std::string address_of(int fd, bool peer) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  auto* raw = reinterpret_cast<sockaddr*>(&address);
  char host[NI_MAXHOST] = "?";
  if ((peer ? getpeername(fd, raw, &size) : getsockname(fd, raw, &size)) == 0) {
    getnameinfo(raw, size, host, sizeof host, nullptr, 0, NI_NUMERICHOST);
  }
  return host;
}

void Strangers::tell(int fd, const std::string& reason) {
  if (told_.size() > kMostTold) return;
  const std::string address = address_of(fd, /*peer=*/true);
  if (!told_.insert(address).second) return;
  if (told_.size() > kMostTold) {
    std::fprintf(
        stderr, "echelon: closed connections from more than %zu addresses\n",
        kMostTold);
    return;
  }
  std::fprintf(
      stderr, "echelon: closed a connection from %s: %s\n", address.c_str(),
      reason.c_str());
}

}  // namespace echelon::authentication
