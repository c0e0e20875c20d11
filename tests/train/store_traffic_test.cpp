// A step needs nothing of the store through which ranks have found each other,
// so its server does not limit how many ranks a job may have.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <fstream>
#include <list>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "echelon/text/file_descriptor.h"
#include "tests/train/trained_command.h"

namespace echelon::store_traffic_test {

using testing_support::Command;
using testing_support::free_port;
using testing_support::TempFolder;

sockaddr_in loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

/// Passes connections on to another port of this host, and counts their bytes.
class Relay {
 public:
  explicit Relay(int to) : to_(to) {
    const sockaddr_in address = loopback(0);
    if (::bind(
            listener_.fd(), reinterpret_cast<const sockaddr*>(&address),
            sizeof address) != 0 ||
        ::listen(listener_.fd(), 16) != 0) {
      throw std::runtime_error("no relay");
    }
    accepting_ = std::thread([this] { accept(); });
  }
  ~Relay() {
    ::shutdown(listener_.fd(), SHUT_RDWR);
    accepting_.join();  // the connections have ended with the ranks
  }
  int port() const {
    sockaddr_in address{};
    socklen_t size = sizeof address;
    ::getsockname(listener_.fd(), reinterpret_cast<sockaddr*>(&address), &size);
    return ntohs(address.sin_port);
  }
  /// Of the connection that has passed most.
  int64_t bytes() const {
    int64_t most = 0;
    for (const auto& one : bytes_) most = std::max<int64_t>(most, one);
    return most;
  }

 private:
  void accept() {
    for (;;) {
      auto from = std::make_shared<FileDescriptor>(
          ::accept(listener_.fd(), nullptr, nullptr));
      if (!from->is_open()) return;
      auto to = std::make_shared<FileDescriptor>(
          ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      const sockaddr_in address = loopback(to_);
      // The server may begin to listen later: the rank tries again.
      if (::connect(
              to->fd(), reinterpret_cast<const sockaddr*>(&address),
              sizeof address) != 0) {
        continue;
      }
      auto& bytes = bytes_.emplace_back(0);
      copies_.emplace_back(
          [&bytes, from, to] { copy(from->fd(), to->fd(), bytes); });
      copies_.emplace_back(
          [&bytes, from, to] { copy(to->fd(), from->fd(), bytes); });
    }
  }
  static void copy(int from, int to, std::atomic<int64_t>& bytes) {
    std::array<char, 4096> part;
    for (ssize_t got; (got = ::read(from, part.data(), part.size())) > 0;) {
      bytes += got;
      if (::send(to, part.data(), static_cast<size_t>(got), MSG_NOSIGNAL) !=
          got) {
        break;
      }
    }
    ::shutdown(from, SHUT_RDWR);
    ::shutdown(to, SHUT_RDWR);
  }

  const int to_;
  FileDescriptor listener_{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  std::list<std::atomic<int64_t>> bytes_;
  std::vector<std::jthread> copies_;  // of the thread that accepts
  std::thread accepting_;
};

/// What rank 1 of two and the store say to each other in so many steps. Ranks
/// of gloo have another connection, by which they tell twice a second where
/// they are.
int64_t bytes_of(int steps, const std::string& backend) {
  const TempFolder folder;
  const std::string configuration = folder.path() + "/job.toml";
  std::ofstream(configuration)
      << "[model]\nname = \"mlp\"\nhidden = [8]\n[data]\nname = "
         "\"digits\"\n[layout]\ndp = 2\n[train]\nbatch = 8\nsteps = "
      << steps << "\nrun = \"" << folder.path()
      << "/run\"\n[comm]\nbackend = \"" << backend << "\"\n";
  const int port = free_port();
  const Relay relay(port);
  const auto rank = [&](int number, int store) {
    return std::make_unique<Command>(
        Words{program("echelon-train"), "train", configuration},
        Words{
            "RANK=" + std::to_string(number),
            "LOCAL_RANK=" + std::to_string(number), "WORLD_SIZE=2",
            "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1",
            "MASTER_PORT=" + std::to_string(store)});
  };
  const auto first = rank(0, port);
  const auto second = rank(1, relay.port());
  EXPECT_EQ(first->wait(), 0) << first->err();
  EXPECT_EQ(second->wait(), 0) << second->err();
  return relay.bytes();
}

TEST(StoreTraffic, IsNoneInAStep) {
  // The timeline of the first steps goes through the store at the end.
  constexpr int kFew = 100, kMore = 400;
  for (const std::string backend : {"local", "gloo"}) {
    const int64_t few = bytes_of(kFew, backend);
    EXPECT_GT(few, 100) << backend;
    // A rank that waits for another asks again each second.
    EXPECT_LT(bytes_of(kFew + kMore, backend) - few, 2 * kMore) << backend;
  }
}

}  // namespace echelon::store_traffic_test
