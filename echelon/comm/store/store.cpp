#include "echelon/comm/store/store.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <sstream>
#include <thread>

#include "echelon/error.h"

namespace echelon {
namespace {

bool one_host(const RankEnvironment& env) {
  return env.local_world_size == env.world_size;
}

std::string place(const RankEnvironment& env) {
  return env.master_addr + ":" + std::to_string(env.master_port);
}

/// A socket bound to the loopback address: the store's constructor would listen
/// on every interface.
int bind_loopback(int port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    throw CommError(
        std::string("store: cannot make a socket: ") + std::strerror(errno));
  }
  const int yes = 1;
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) < 0) {
    const int error = errno;
    ::close(fd);
    throw ConfigError(
        "store: cannot listen on 127.0.0.1:" + std::to_string(port) + ": " +
        std::strerror(error) +
        "; another job may use the port: set "
        "MASTER_PORT to a free one");
  }
  return fd;
}

/// Returns when somebody listens at the loopback port, or after three seconds.
/// After a refusal TCPStore waits up to a second, while rank 0 is usually a few
/// milliseconds late.
void wait_for_listener(int port, std::chrono::milliseconds timeout) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const auto deadline = std::chrono::steady_clock::now() +
                        std::min(timeout, std::chrono::milliseconds(3000));
  while (std::chrono::steady_clock::now() < deadline) {
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return;
    const bool listens =
        ::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) ==
        0;
    ::close(fd);
    if (listens) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

std::string without_stack(const std::exception& error) {
  if (const auto* c10_error = dynamic_cast<const c10::Error*>(&error)) {
    return c10_error->what_without_backtrace();
  }
  return error.what();
}

c10::intrusive_ptr<c10d::Store> connect(
    const RankEnvironment& env, bool serve, std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(env.master_port);
  options.isServer = serve;
  options.waitWorkers = false;
  options.timeout = timeout;
  if (serve && env.master_fd) {
    options.masterListenFd = *env.master_fd;
  } else if (serve && one_host(env)) {
    options.masterListenFd = bind_loopback(env.master_port);
  }
  const std::string host =
      one_host(env) && !env.store_is_served ? "127.0.0.1" : env.master_addr;
  if (!serve && host == "127.0.0.1") {
    wait_for_listener(env.master_port, timeout);
  }
  try {
    return c10::make_intrusive<c10d::TCPStore>(host, options);
  } catch (const std::exception& error) {
    const std::string text = without_stack(error);
    if (text.find("EADDRINUSE") != std::string::npos ||
        text.find("address already in use") != std::string::npos) {
      throw ConfigError(
          "store: port " + std::to_string(env.master_port) +
          " is in use; set MASTER_PORT to a free one");
    }
    std::ostringstream message;
    message << "rank " << env.rank << ": the master at " << place(env)
            << " did not answer within " << timeout.count() / 1000
            << " s; check MASTER_ADDR and MASTER_PORT, that rank 0 runs there "
               "and that no firewall is between";
    throw CommError(message.str());
  }
}

c10::intrusive_ptr<c10d::Store>
prefixed(const RankEnvironment& env, c10::intrusive_ptr<c10d::Store> store) {
  return c10::make_intrusive<c10d::PrefixStore>(
      "echelon/" + env.job + "/" + std::to_string(env.generation),
      std::move(store));
}

}  // namespace

c10::intrusive_ptr<c10d::Store>
connect_store(const RankEnvironment& env, std::chrono::milliseconds timeout) {
  const bool serve = env.rank == 0 && !env.store_is_served;
  return prefixed(env, connect(env, serve, timeout));
}

c10::intrusive_ptr<c10d::Store> connect_store_again(
    const RankEnvironment& env, std::chrono::milliseconds timeout) {
  return prefixed(env, connect(env, false, timeout));
}

std::vector<std::string> exchange(
    c10d::Store& store, const std::string& topic, int rank, int size,
    const std::string& value, std::chrono::milliseconds timeout,
    const std::string& where) {
  const auto key = [&](int r) { return topic + "/" + std::to_string(r); };
  std::vector<std::string> keys;
  for (int r = 0; r < size; ++r) keys.push_back(key(r));
  try {
    store.set(keys[static_cast<size_t>(rank)], value);
    store.wait(keys, timeout);
  } catch (const std::exception& error) {
    std::string missing;
    try {
      for (int r = 0; r < size; ++r) {
        if (!store.check({key(r)})) missing += " " + std::to_string(r);
      }
    } catch (const std::exception&) {
      throw CommError(
          "rank " + std::to_string(rank) + ": the store at " + where +
          " was lost: " + without_stack(error));
    }
    throw CommError(
        "rank " + std::to_string(rank) + ": of " + std::to_string(size) +
        " ranks these did not come to " + where + " within " +
        std::to_string(timeout.count() / 1000) + " s:" + missing);
  }
  std::vector<std::string> values;
  for (const auto& k : keys) values.push_back(store.get_to_str(k));
  return values;
}

std::string reachable_address(const RankEnvironment& env) {
  if (one_host(env)) return "127.0.0.1";
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  const std::string port = std::to_string(env.master_port);
  if (::getaddrinfo(env.master_addr.c_str(), port.c_str(), &hints, &found) !=
      0) {
    throw ConfigError(
        "MASTER_ADDR=" + env.master_addr + " cannot be resolved to an address");
  }
  std::string address;
  const int fd = ::socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_storage own{};
  socklen_t length = sizeof(own);
  if (fd >= 0 && ::connect(fd, found->ai_addr, found->ai_addrlen) == 0 &&
      ::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) == 0) {
    char text[NI_MAXHOST];
    if (::getnameinfo(
            reinterpret_cast<sockaddr*>(&own), length, text, sizeof(text),
            nullptr, 0, NI_NUMERICHOST) == 0) {
      address = text;
    }
  }
  if (fd >= 0) ::close(fd);
  ::freeaddrinfo(found);
  if (address.empty()) {
    throw CommError("no route from this host to the master at " + place(env));
  }
  return address;
}

}  // namespace echelon
