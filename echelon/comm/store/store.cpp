// The store is a private one behind a prefix where our launcher gave the ranks
// a key, and a TCPStore, which anyone may use who reaches it, under other
// launchers. The constructor of TCPStore would listen on every interface and
// retry a refused connection once a second; on one host the loopback socket is
// bound here instead, and a rank waits until somebody listens. All ranks have
// one server, so that every call is a round trip: gather() moves one piece at a
// time at rank 0's request, and the status board publishes from a thread of its
// own.
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
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

#include "echelon/authentication/key.h"
#include "echelon/comm/store/bounded_store.h"
#include "echelon/comm/store/private_store.h"
#include "echelon/comm/store/store_server.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

// How long the server may take to answer. A hang report waits for the status
// board, so its limit is shorter.
constexpr std::chrono::milliseconds kAnswer{10000};
constexpr std::chrono::milliseconds kAnswerOfBoard{5000};

bool one_host(const RankEnvironment& env) {
  return env.local_world_size == env.world_size;
}

std::string place(const RankEnvironment& env) {
  return format("{}:{}", env.master_addr, env.master_port);
}

sockaddr_in loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

/// A socket bound to the loopback address: the store's constructor would listen
/// on every interface.
int bind_loopback(int port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    throw CommError(
        format("store: cannot make a socket: {}", std::strerror(errno)));
  }
  const int yes = 1;
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  const sockaddr_in address = loopback(port);
  if (::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) <
      0) {
    const int error = errno;
    ::close(fd);
    throw ConfigError(format(
        "store: cannot listen on 127.0.0.1:{}: {}; another job may use the "
        "port: set MASTER_PORT to a free one",
        port, std::strerror(error)));
  }
  return fd;
}

/// Returns when somebody listens at the loopback port, or after three seconds.
/// After a refusal TCPStore waits up to a second, while rank 0 is usually a few
/// milliseconds late.
void wait_for_listener(int port, std::chrono::milliseconds timeout) {
  const sockaddr_in address = loopback(port);
  const auto deadline = std::chrono::steady_clock::now() +
                        std::min(timeout, std::chrono::milliseconds(3000));
  while (std::chrono::steady_clock::now() < deadline) {
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return;
    const bool listens = ::connect(
                             fd, reinterpret_cast<const sockaddr*>(&address),
                             sizeof(address)) == 0;
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

// A rank has two, and backends may clone them.
constexpr size_t kConnectionsOfRank = 16;

c10::intrusive_ptr<c10d::Store> connect_by_key(
    const RankEnvironment& env, bool serve, std::chrono::milliseconds timeout) {
  const auto key = authentication::Key::from_hex(env.store_key);
  if (!key) {
    throw ConfigError(
        "environment: ECHELON_STORE_KEY is not a key of 64 hexadecimal digits; "
        "the launcher sets it");
  }
  std::shared_ptr<StoreServer> server;
  if (serve) {
    StoreLimits limits;
    limits.connections =
        kConnectionsOfRank * static_cast<size_t>(env.world_size);
    server = std::make_shared<StoreServer>(
        env.master_fd ? *env.master_fd : bind_loopback(env.master_port), *key,
        limits);
  }
  try {
    return connect_private_store(
        {env.master_addr, env.master_port, *key}, timeout, server);
  } catch (const CommError& error) {
    throw CommError(format("rank {}: {}", env.rank, error.what()));
  }
}

c10::intrusive_ptr<c10d::Store> connect(
    const RankEnvironment& env, bool serve, std::chrono::milliseconds timeout) {
  if (!env.store_key.empty()) return connect_by_key(env, serve, timeout);
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
      throw ConfigError(format(
          "store: port {} is in use; set MASTER_PORT to a free one",
          env.master_port));
    }
    throw CommError(format(
        "rank {}: the master at {} did not answer within {} s; check "
        "MASTER_ADDR and MASTER_PORT, that rank 0 runs there and that no "
        "firewall is between",
        env.rank, place(env), timeout.count() / 1000));
  }
}

c10::intrusive_ptr<c10d::Store> bounded_and_prefixed(
    const RankEnvironment& env, c10::intrusive_ptr<c10d::Store> store,
    std::chrono::milliseconds limit) {
  return c10::make_intrusive<c10d::PrefixStore>(
      format("echelon/{}/{}", env.job, env.generation),
      bounded_store(
          std::move(store), limit,
          format(
              "{} (served by {})", place(env),
              env.store_is_served ? "the launcher" : "rank 0")));
}

std::string status_key(int rank) {
  return format("status/{}", rank);
}

/// Publishes from a thread of its own, since setting a key is a round trip.
class StoreBoard : public StatusBoard {
 public:
  explicit StoreBoard(c10::intrusive_ptr<c10d::Store> store)
      : store_(std::move(store)), thread_([this] { run(); }) {}

  ~StoreBoard() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  void publish(int rank, const RankStatus& status) override {
    std::lock_guard lock(mutex_);
    rank_ = rank;
    status_ = status;
    changed_ = true;
  }

  std::optional<RankStatus> read(int rank) override {
    try {
      if (!store_->check({status_key(rank)})) return std::nullopt;
      return status_from_bytes(store_->get_to_str(status_key(rank)));
    } catch (const CommError&) {
      throw;  // its server hangs
    } catch (const std::exception&) {
      return std::nullopt;  // the store is gone: there is nothing to report
    }
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      wake_.wait_for(lock, std::chrono::milliseconds(500));
      if (!changed_) continue;
      changed_ = false;
      const std::string bytes = to_bytes(status_);
      const std::string key = status_key(rank_);
      // publish() must not wait for the network.
      lock.unlock();
      try {
        store_->set(key, bytes);
      } catch (const std::exception&) {
        return;  // the job is ending
      }
      lock.lock();
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
  std::mutex mutex_;
  std::condition_variable wake_;
  RankStatus status_;
  int rank_ = 0;
  bool changed_ = false;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace

c10::intrusive_ptr<c10d::Store>
connect_store(const RankEnvironment& env, std::chrono::milliseconds timeout) {
  const bool serve = env.rank == 0 && !env.store_is_served;
  return bounded_and_prefixed(env, connect(env, serve, timeout), kAnswer);
}

c10::intrusive_ptr<c10d::Store> connect_store_again(
    const RankEnvironment& env, std::chrono::milliseconds timeout) {
  return bounded_and_prefixed(
      env, connect(env, false, timeout), kAnswerOfBoard);
}

std::vector<std::string> exchange(
    c10d::Store& store, const std::string& topic, int rank, int size,
    const std::string& value, std::chrono::milliseconds timeout,
    const std::string& where) {
  std::vector<std::string> keys;
  for (int r = 0; r < size; ++r) keys.push_back(format("{}/{}", topic, r));
  try {
    store.set(keys[static_cast<size_t>(rank)], value);
    store.wait(keys, timeout);
  } catch (const CommError&) {
    throw;  // the server hangs
  } catch (const std::exception& error) {
    std::string missing;
    try {
      for (int r = 0; r < size; ++r) {
        if (!store.check({keys[r]})) missing += " " + std::to_string(r);
      }
    } catch (const std::exception&) {
      throw CommError(format(
          "rank {}: the store at {} was lost: {}", rank, where,
          without_stack(error)));
    }
    throw CommError(format(
        "rank {}: of {} ranks these did not come to {} within {} s:{}", rank,
        size, where, timeout.count() / 1000, missing));
  }
  std::vector<std::string> values;
  for (const auto& k : keys) values.push_back(store.get_to_str(k));
  return values;
}

std::vector<std::string> gather(
    c10d::Store& store, const std::string& topic, int rank, int size,
    const std::string& value, std::chrono::milliseconds timeout) {
  // The store refuses values of more than 8 MiB.
  constexpr size_t kPiece = size_t{4} << 20;
  const auto key = [&](int of, const char* what, size_t piece) {
    return format("{}/{}/{}/{}", topic, of, what, piece);
  };
  const auto wait = [&](int of, const std::string& name) {
    try {
      store.wait({name}, timeout);
    } catch (const CommError&) {
      throw;  // the server hangs
    } catch (const std::exception&) {
      throw CommError(format(
          "gathering values: rank {} did not come within {} s", of,
          timeout.count() / 1000));
    }
  };
  if (rank != 0) {
    for (size_t begin = 0, piece = 0; begin == 0 || begin < value.size();
         begin += kPiece, ++piece) {
      // Otherwise the server would hold the values of all ranks at once.
      wait(0, key(rank, "ask", piece));
      const bool last = begin + kPiece >= value.size();
      std::string bytes(1, last ? '.' : '+');
      bytes.append(value, begin, kPiece);
      store.set(key(rank, "piece", piece), bytes);
    }
    return {};
  }
  std::vector<std::string> all = {value};
  for (int from = 1; from < size; ++from) {
    std::string& whole = all.emplace_back();
    bool more = true;
    for (size_t piece = 0; more; ++piece) {
      const std::string name = key(from, "piece", piece);
      store.set(key(from, "ask", piece), std::string("1"));
      wait(from, name);
      const std::string bytes = store.get_to_str(name);
      store.deleteKey(name);
      store.deleteKey(key(from, "ask", piece));
      more = bytes[0] == '+';
      whole.append(bytes, 1);
    }
  }
  return all;
}

std::unique_ptr<StatusBoard>
make_store_board(c10::intrusive_ptr<c10d::Store> store) {
  return std::make_unique<StoreBoard>(std::move(store));
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
  // Connecting a datagram socket sends nothing, but the kernel chooses the
  // route, and with it this host's own address on it.
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
