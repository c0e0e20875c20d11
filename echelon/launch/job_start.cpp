#include "echelon/launch/job_start.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "echelon/authentication/key.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::launch {
namespace {

// "10.0.0.5, fd00::5": the addresses that the user could have meant.
std::string own_addresses() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return "unknown addresses";
  std::string text;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr ||
        (entry->ifa_addr->sa_family != AF_INET &&
         entry->ifa_addr->sa_family != AF_INET6)) {
      continue;
    }
    const socklen_t size = entry->ifa_addr->sa_family == AF_INET
                               ? sizeof(sockaddr_in)
                               : sizeof(sockaddr_in6);
    char host[NI_MAXHOST];
    if (getnameinfo(
            entry->ifa_addr, size, host, sizeof host, nullptr, 0,
            NI_NUMERICHOST) == 0) {
      text += (text.empty() ? "" : ", ") + std::string(host);
    }
  }
  freeifaddrs(list);
  return text.empty() ? "no address" : text;
}

[[noreturn]] void refuse_bind(const std::string& address, int port, int error) {
  const std::string place =
      format("[launch] master {}, port {}: ", address, port);
  if (error == EADDRINUSE) {
    throw ConfigError(
        place +
        "the port is in use; give another --master-port, or `ss -ltnp` tells "
        "by whom");
  }
  if (error == EADDRNOTAVAIL) {
    throw ConfigError(format(
        "{}not an address of this host, which has {}; --node-rank 0 runs on "
        "the host that --master-addr names",
        place, own_addresses()));
  }
  if (error == EACCES) {
    throw ConfigError(place + "ports below 1024 are not for every user");
  }
  throw ConfigError(place + std::strerror(error));
}

}  // namespace

Addresses find_address(
    const std::string& address, int port, bool name_may_come,
    std::string& reason) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int failure = getaddrinfo(
      address.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (failure == 0) return {found, freeaddrinfo};
  reason = gai_strerror(failure);
  const bool unknown = failure == EAI_NONAME || failure == EAI_NODATA;
  const bool may_come =
      unknown ? name_may_come : failure == EAI_AGAIN || failure == EAI_FAIL;
  const bool number =
      address.find_first_not_of("0123456789.") == std::string::npos;
  if (!may_come || number) {
    throw ConfigError(format(
        "[launch] master address \"{}\": {}; give its number", address,
        reason));
  }
  return {nullptr, freeaddrinfo};
}

Addresses resolve(const std::string& address, int port) {
  std::string reason;
  auto found = find_address(address, port, /*name_may_come=*/false, reason);
  if (!found) {
    throw ConfigError(format(
        "[launch] master address \"{}\": {}; give its number", address,
        reason));
  }
  return found;
}

int master_port(const LaunchOptions& options) {
  constexpr int kDefault = 29500;
  return options.master_port != 0 ? options.master_port : kDefault;
}

std::string master_text(const LaunchOptions& options) {
  return format("{}, port {}", options.master_addr, master_port(options));
}

BoundSocket bind_master(const std::string& address, int port) {
  const auto found = resolve(address, port);
  FileDescriptor file(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int yes = 1;
  if (!file.is_open()) refuse_bind(address, port, errno);
  // Lets another program of the job open the same port while nobody listens.
  setsockopt(file.fd(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  if (bind(file.fd(), found->ai_addr, found->ai_addrlen) != 0 ||
      getsockname(file.fd(), reinterpret_cast<sockaddr*>(&bound), &size) != 0) {
    refuse_bind(address, port, errno);
  }
  char host[NI_MAXHOST];
  char service[NI_MAXSERV];
  getnameinfo(
      reinterpret_cast<sockaddr*>(&bound), size, host, sizeof host, service,
      sizeof service, NI_NUMERICHOST | NI_NUMERICSERV);
  return {std::move(file), host, std::atoi(service)};
}

std::pair<sockaddr_un, socklen_t> abstract_address(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const size_t size = std::min(name.size(), sizeof address.sun_path - 1);
  std::copy_n(name.begin(), size, address.sun_path + 1);
  return {
      address,
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size)};
}

FileDescriptor claim_port(const std::string& address, int port) {
  const std::string name = format("echelon-master-{}-{}", address, port);
  const auto [place, size] = abstract_address(name);
  FileDescriptor file(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!file.is_open() ||
      bind(file.fd(), reinterpret_cast<const sockaddr*>(&place), size) != 0) {
    if (errno == EADDRINUSE) {
      throw ConfigError(format(
          "[launch] master {}, port {}: the port is in use by another job, or "
          "by a process that took the name @{} which keeps it; give another "
          "--master-port, or `ss -xap` tells by whom",
          address, port, name));
    }
    refuse_bind(address, port, errno);
  }
  return file;
}

JobStart start_alone(const LaunchOptions& options) {
  if (!options.master_addr.empty()) {
    bind_master(options.master_addr, 0);  // throws if mistyped
  }
  BoundSocket master = bind_master("127.0.0.1", options.master_port);
  JobStart start;
  start.claim = claim_port(master.address, master.port);
  if (options.listen_early) listen(master.socket.fd(), 1024);
  start.place.job = random_job_id();
  start.place.master_addr = master.address;
  start.place.master_port = master.port;
  auto key = authentication::Key::random();
  key.set_encrypts(options.tls);
  start.place.store_key = key.to_hex();
  start.world_size = options.num_ranks;
  start.master = std::move(master.socket);
  return start;
}

}  // namespace echelon::launch
