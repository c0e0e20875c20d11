#include "echelon/monitoring/exporter.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "echelon/error.h"
#include "echelon/monitoring/metric_page.h"
#include "echelon/monitoring/observer.h"
#include "echelon/monitoring/page_server.h"
#include "echelon/text/file_descriptor.h"
#include "echelon/text/format.h"

namespace echelon::monitoring {
namespace {

constexpr const char* kPath = "/metrics";
constexpr std::chrono::seconds kBetweenLooks{1};

[[noreturn]] void
refuse_address(const std::string& address, const std::string& why) {
  throw ConfigError(format("--metrics-address {}: {}", address, why));
}

struct HostAndPort {
  std::string host;
  std::string port;
};

HostAndPort split(const std::string& address) {
  const size_t colon = address.rfind(':');
  HostAndPort parts{"127.0.0.1", address};
  if (colon != std::string::npos) {
    parts = {address.substr(0, colon), address.substr(colon + 1)};
  }
  std::string& host = parts.host;
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string::npos) {
    refuse_address(address, "an IPv6 address is in brackets, as [::1]:9464");
  }
  char* end = nullptr;
  const long port = std::strtol(parts.port.c_str(), &end, 10);
  if (host.empty() || parts.port.empty() || *end != '\0' || port < 1 ||
      port > 65535) {
    refuse_address(
        address,
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

// Also says whether only this host reaches it.
FileDescriptor listen_at(const std::string& address, bool& loopback) {
  const auto [host, port] = split(address);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int failure = getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
  if (failure != 0) refuse_address(address, gai_strerror(failure));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(
      found, freeaddrinfo);
  loopback = is_loopback(found->ai_addr);
  FileDescriptor listener(
      socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int yes = 1;
  setsockopt(listener.fd(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (!listener.is_open() ||
      bind(listener.fd(), found->ai_addr, found->ai_addrlen) != 0 ||
      listen(listener.fd(), 64) != 0) {
    const int error = errno;
    refuse_address(
        address, error == EADDRINUSE
                     ? format("the port is in use; give another one, or `ss "
                              "-ltnp` tells by whom")
                     : std::strerror(error));
  }
  return listener;
}

// The process that serves.
[[noreturn]] void serve(
    FileDescriptor listener, const ExporterOptions& options,
    const JobBoard& board) {
  JobObserver observer(options.run, options.folder, options.saves, board);
  const auto make = [&] { return metric_page(observer.look()); };
  PageServer server(std::move(listener), kPath, make);
  auto looked = std::chrono::steady_clock::now();
  for (;;) {
    server.serve(kBetweenLooks);
    const auto now = std::chrono::steady_clock::now();
    if (now - looked < kBetweenLooks) continue;
    looked = now;
    observer.follow_run();
  }
}

// Closes what this process has of the launcher's: locks and sockets are held by
// whoever has them open.
void keep_only(int kept) {
  const int null = ::open("/dev/null", O_RDWR);
  for (int fd = 0; fd <= 2; ++fd) dup2(null, fd);
  if (kept > 3) close_range(3, static_cast<unsigned>(kept) - 1, 0);
  close_range(static_cast<unsigned>(kept) + 1, ~0U, 0);
}

}  // namespace

Exporter::Exporter(const ExporterOptions& options, const JobBoard& board) {
  FileDescriptor listener = listen_at(options.address, is_loopback_);
  url_ = format(
      "http://{}{}{}",
      options.address.find(':') == std::string::npos ? "127.0.0.1:" : "",
      options.address, kPath);
  const pid_t launcher = ::getpid();
  pid_ = ::fork();
  if (pid_ < 0) {
    refuse_address(
        options.address,
        format("no process that serves the page: {}", std::strerror(errno)));
  }
  if (pid_ > 0) return;
  setpgid(0, 0);  // a terminal's Ctrl-C is not for it
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  prctl(PR_SET_NAME, "echelon-metrics");
  if (::getppid() != launcher) _exit(0);
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, nullptr);
  setpriority(PRIO_PROCESS, 0, 10);  // the ranks come first
  keep_only(listener.fd());
  try {
    serve(std::move(listener), options, board);
  } catch (const std::exception&) {
  }
  _exit(1);
}

Exporter::~Exporter() {
  kill(pid_, SIGKILL);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

}  // namespace echelon::monitoring
