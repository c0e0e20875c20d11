#include "echelon/comm/store/private_store.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "echelon/authentication/handshake.h"
#include "echelon/comm/store/store.h"
#include "echelon/comm/store/store_messages.h"
#include "echelon/error.h"
#include "tests/support/error_text.h"

namespace echelon::private_store_test {

using authentication::Key;
using authentication::Port;
using authentication::State;
using testing::HasSubstr;
using namespace std::chrono_literals;
using StorePointer = c10::intrusive_ptr<c10d::Store>;
using Keys = std::vector<std::string>;

sockaddr_in loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

/// A store's server on loopback.
class Served : public testing::Test {
 protected:
  Served() { start({}); }
  void start(const StoreLimits& limits, bool encrypts = false) {
    server_.reset();
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = loopback(0);
    socklen_t size = sizeof address;
    auto* raw = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(::bind(fd, raw, size), 0);
    EXPECT_EQ(::getsockname(fd, raw, &size), 0);
    place_ = {"127.0.0.1", ntohs(address.sin_port), Key::random()};
    place_.key.set_encrypts(encrypts);
    server_ = std::make_shared<StoreServer>(fd, place_.key, limits);
  }
  StorePointer connect(std::chrono::milliseconds timeout = 30s) const {
    return connect_private_store(place_, timeout);
  }

  StorePlace place_;
  std::shared_ptr<StoreServer> server_;
};

TEST_F(Served, AnswersWhenItIsEncrypted) {
  start({}, /*encrypts=*/true);
  const std::string large(6 << 20, 'x');
  const auto store = connect();
  std::thread setter([&] {
    const auto other = connect();
    std::this_thread::sleep_for(20ms);
    other->set("late", large);
  });
  EXPECT_TRUE(store->get_to_str("late") == large);
  setter.join();
  EXPECT_EQ(store->add("n", 2), 2);
  EXPECT_TRUE(store->deleteKey("late"));
  // Who does not encrypt is another program.
  place_.key.set_encrypts(false);
  EXPECT_THAT(
      error_text<CommError>([&] { connect(200ms); }),
      HasSubstr("nobody serves the store at 127.0.0.1:"));
}

// Both kinds of store answer the same, so that c10d's backends see none.
TEST_F(Served, AnswersAsTCPStoreDoes) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const auto other = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const auto answers = [](c10d::Store& store) {
    std::vector<std::string> all;
    const auto text = [](const std::vector<uint8_t>& bytes) {
      return std::string(bytes.begin(), bytes.end());
    };
    const auto note = [&](auto value) { all.push_back(std::to_string(value)); };
    store.set("a", std::string("x"));
    all.push_back(store.get_to_str("a"));
    store.set("a", std::string());
    all.push_back(store.get_to_str("a"));
    note(store.add("n", 2));
    note(store.add("n", -5));
    note(store.add("n", 0));
    all.push_back(store.get_to_str("n"));
    note(store.check({"a", "n"}));
    note(store.check({"a", "none"}));
    note(store.check({}));
    all.push_back(store.compareSet("c", "not there", "y"));
    note(store.check({"c"}));
    all.push_back(store.compareSet("c", "", "y"));
    all.push_back(store.compareSet("c", "x", "z"));
    all.push_back(store.compareSet("c", "y", "z"));
    store.append("c", {'1'});
    store.append("d", {'2'});
    store.multiSet({"e", "f"}, {{'3'}, {0, 255}});
    for (const auto& value : store.multiGet({"c", "d", "e", "f"})) {
      all.push_back(text(value));
    }
    const int64_t before = store.getNumKeys();
    note(store.deleteKey("a"));
    note(store.deleteKey("a"));
    note(store.getNumKeys() - before);
    note(store.hasExtendedApi());
    store.wait({"c", "d"}, 1s);
    try {
      store.wait({"c", "none"}, 20ms);
    } catch (const c10::DistStoreError&) {
      all.push_back("late");
    }
    return all;
  };
  const auto store = connect();
  EXPECT_EQ(answers(*store), answers(*other));
  EXPECT_EQ(store->getNumKeys(), 5);
}

TEST_F(Served, AWaitingCallEndsWhenItsLastKeyComes) {
  const auto store = connect();
  std::thread other([this] {
    const auto mine = connect();
    mine->set("one", std::string("1"));
    std::this_thread::sleep_for(20ms);
    mine->set("two", std::string("2"));
  });
  store->wait({"two", "one"});
  EXPECT_EQ(store->get_to_str("two"), "2");
  other.join();
}

TEST_F(Served, AKeyThatDoesNotComeEndsTheCallAlone) {
  const auto store = connect();
  store->setTimeout(20ms);
  EXPECT_THAT(
      error_text<c10::DistStoreError>([&] { store->get("none"); }),
      HasSubstr("\"none\""));
  for (int i = 0; i < 3; ++i) {
    EXPECT_THROW(store->wait({"none"}, 5ms), c10::DistStoreError);
  }
  store->set("none", std::string("here"));
  EXPECT_EQ(store->get_to_str("none"), "here");
}

TEST_F(Served, ManyRanksExchangeValues) {
  constexpr int kRanks = 24;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([this, rank] {
      const auto store = connect();
      for (int turn = 0; turn < 5; ++turn) {
        const auto values = exchange(
            *store, std::to_string(turn), rank, kRanks,
            std::to_string(rank * turn), 30s, "here");
        for (int r = 0; r < kRanks; ++r) {
          EXPECT_EQ(values[static_cast<size_t>(r)], std::to_string(r * turn));
        }
      }
    });
  }
  for (auto& rank : ranks) rank.join();
}

TEST_F(Served, ACloneIsAnotherConnection) {
  const auto store = connect();
  const auto clone = store->clone();
  std::thread waits([&] { clone->wait({"key"}); });
  store->set("key", std::string("1"));
  waits.join();
}

TEST_F(Served, LargeValuesPassAndLargerOnesAreRefused) {
  const auto store = connect();
  std::string value(size_t{8} << 20, 'x');
  value.front() = 'a';
  value.back() = 'z';
  store->set("large", value);
  EXPECT_TRUE(store->get_to_str("large") == value);
  value += 'x';
  EXPECT_THAT(
      error_text<CommError>([&] { store->set("larger", value); }),
      HasAll("\"larger\"", "8388609 bytes", "8388608 are allowed"));
  EXPECT_THAT(
      error_text<CommError>(
          [&] { store->set("largest", std::string(size_t{17} << 20, 'x')); }),
      HasSubstr("in one call"));
  EXPECT_THAT(
      error_text<CommError>(
          [&] { store->set(std::string(5000, 'k'), std::string("1")); }),
      HasAll("5000 bytes", "4096 are allowed"));
  EXPECT_THAT(
      error_text<CommError>([&] {
        store->set("a", std::string("no number"));
        store->add("a", 1);
      }),
      HasSubstr("no number"));
  EXPECT_EQ(store->getNumKeys(), 2);
}

TEST_F(Served, AStoreThatIsFullSaysSo) {
  start({.total = 1000});
  const auto store = connect();
  store->set("a", std::string(900, 'x'));
  EXPECT_THAT(
      error_text<CommError>([&] { store->set("b", std::string(200, 'x')); }),
      HasSubstr("1000 are allowed"));
  store->deleteKey("a");
  store->set("b", std::string(200, 'x'));
}

TEST_F(Served, AServerThatEndsIsReported) {
  const auto store = connect();
  server_.reset();
  EXPECT_THROW(store->set("a", std::string("x")), c10::DistNetworkError);
  EXPECT_THROW(store->get("a"), c10::DistNetworkError);
  EXPECT_THAT(
      error_text<CommError>([&] { connect(50ms); }),
      HasSubstr("nobody serves the store"));
}

TEST_F(Served, AnotherJobsKeyOpensNothing) {
  StorePlace other = place_;
  other.key = Key::random();
  EXPECT_THAT(
      error_text<CommError>([&] { connect_private_store(other, 10s); }),
      HasSubstr("has not this job's key"));
  connect()->set("a", std::string("x"));
}

/// A connection of somebody who has not the key.
class Stranger {
 public:
  explicit Stranger(int port) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    const sockaddr_in address = loopback(port);
    EXPECT_EQ(
        ::connect(
            fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address),
        0);
  }
  Stranger(Stranger&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  ~Stranger() {
    if (fd_ >= 0) ::close(fd_);
  }
  int fd() const { return fd_; }
  /// False when the other end has closed the connection.
  bool put(const std::string& bytes) const {
    return ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes.size());
  }
  std::string take(size_t size) const {
    std::string bytes(size, '\0');
    const ssize_t came = ::recv(fd_, bytes.data(), size, MSG_WAITALL);
    bytes.resize(came < 0 ? 0 : static_cast<size_t>(came));
    return bytes;
  }
  /// Waits until the other end has closed the connection.
  bool ended() const {
    pollfd file{fd_, POLLIN, 0};
    return ::poll(&file, 1, 20'000) == 1 && take(1).empty();
  }

 private:
  int fd_;
};

int64_t memory_kib() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t size = 0;
    if (word == "VmRSS:" && status >> size) return size;
  }
  return 0;
}

class StoreStrangers : public Served {
 protected:
  /// The job goes on while they try, and the server does not grow.
  void expect_no_harm(const std::function<void()>& attack) {
    const auto store = connect();
    store->set("state", std::string("mine"));
    const int64_t before = memory_kib();
    attack();
    EXPECT_LT(memory_kib() - before, 32 << 10);
    EXPECT_EQ(store->get_to_str("state"), "mine");
    EXPECT_EQ(store->getNumKeys(), 1);
    EXPECT_EQ(connect()->get_to_str("state"), "mine");
  }
};

TEST_F(StoreStrangers, OtherProgramsAreClosed) {
  expect_no_harm([&] {
    for (const std::string& bytes :
         {std::string(1000, '\0'), std::string("GET / HTTP/1.1\r\n\r\n"),
          std::string("ECHhost1") + std::string(32, 'n'),
          StoreWriter(StoreCall::count).take()}) {
      const Stranger stranger(place_.port);
      EXPECT_TRUE(stranger.put(bytes));
      EXPECT_TRUE(stranger.ended());
    }
  });
}

// As TCPStore's clients begin.
TEST_F(StoreStrangers, AClientOfTCPStoreGetsNothing) {
  expect_no_harm([&] {
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(place_.port);
    options.waitWorkers = false;
    options.timeout = 200ms;
    EXPECT_ANY_THROW({
      c10d::TCPStore client("127.0.0.1", options);
      client.set("state", std::vector<uint8_t>{'t'});
      client.get("state");
    });
  });
}

TEST_F(StoreStrangers, WhoIsSlowIsClosed) {
  start({.proof = 300ms});
  expect_no_harm([&] {
    const Stranger stranger(place_.port);
    const std::string hello = "ECHstor1" + std::string(64, 'n');
    size_t sent = 0;
    while (sent < hello.size() && stranger.put(hello.substr(sent, 1))) {
      ++sent;
      std::this_thread::sleep_for(50ms);
    }
    EXPECT_LT(sent, hello.size());
  });
}

TEST_F(StoreStrangers, WhoSendsMuchIsClosed) {
  expect_no_harm([&] {
    const Stranger stranger(place_.port);
    const std::string much(size_t{1} << 20, 'x');
    int sent = 0;
    EXPECT_TRUE(stranger.put("ECHstor1"));
    while (sent < 1000 && stranger.put(much)) ++sent;
    EXPECT_LT(sent, 1000);
  });
}

TEST_F(StoreStrangers, NoProofOpensTheStore) {
  expect_no_harm([&] {
    const std::string hello = "ECHstor1" + std::string(32, 'n');
    for (const bool reflected : {false, true}) {
      const Stranger stranger(place_.port);
      EXPECT_TRUE(stranger.put(hello));
      const std::string answer = stranger.take(72);
      ASSERT_EQ(answer.size(), 72u);
      EXPECT_TRUE(
          stranger.put(reflected ? answer.substr(40) : std::string(32, 'p')));
      stranger.put(StoreWriter(StoreCall::count).take());
      EXPECT_TRUE(stranger.ended());
    }
  });
}

TEST_F(StoreStrangers, ARecordedHandshakeOpensNothing) {
  expect_no_harm([&] {
    // The recorder stands between a rank and the server.
    int ends[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    const Stranger between(place_.port);
    std::thread rank([&] {
      EXPECT_EQ(
          authentication::prove(
              ends[0], place_.key, Port::store,
              std::chrono::steady_clock::now() + 10s),
          State::proved);
    });
    std::string hello(40, '\0');
    std::string proof(32, '\0');
    EXPECT_EQ(::recv(ends[1], hello.data(), 40, MSG_WAITALL), 40);
    EXPECT_TRUE(between.put(hello));
    EXPECT_EQ(::send(ends[1], between.take(72).data(), 72, 0), 72);
    EXPECT_EQ(::recv(ends[1], proof.data(), 32, MSG_WAITALL), 32);
    EXPECT_TRUE(between.put(proof));
    EXPECT_EQ(::send(ends[1], between.take(1).data(), 1, 0), 1);
    rank.join();
    ::close(ends[0]);
    ::close(ends[1]);
    const Stranger again(place_.port);
    EXPECT_TRUE(again.put(hello));
    EXPECT_EQ(again.take(72).size(), 72u);
    EXPECT_TRUE(again.put(proof));
    EXPECT_TRUE(again.ended());
  });
}

TEST_F(StoreStrangers, IdleOnesKeepNoRankOut) {
  start({.proof = 1h});
  expect_no_harm([&] {
    std::vector<Stranger> idle;
    for (int i = 0; i < 400; ++i) idle.emplace_back(place_.port);
    connect()->check({"state"});
    EXPECT_TRUE(idle.front().ended());
  });
}

// Even a rank cannot make the server hold more than a message.
TEST_F(StoreStrangers, ACallThatIsTooLargeOrBrokenEndsTheConnection) {
  expect_no_harm([&] {
    const std::string huge = "\xff\xff\xff\x7f";
    std::string lies = StoreWriter(StoreCall::check).number(1 << 30).take();
    std::string half = StoreWriter(StoreCall::set).number(1).number(-1).take();
    std::string unknown = StoreWriter(static_cast<StoreCall>(77)).take();
    for (const std::string& bytes : {huge, lies, half, unknown}) {
      const Stranger rank(place_.port);
      ASSERT_EQ(
          authentication::prove(
              rank.fd(), place_.key, Port::store,
              std::chrono::steady_clock::now() + 10s),
          State::proved);
      EXPECT_TRUE(rank.put(bytes));
      EXPECT_TRUE(rank.ended());
    }
  });
}

TEST_F(StoreStrangers, ManyRanksOfAKeyAreTooMany) {
  start({.connections = 3});
  std::vector<StorePointer> stores;
  for (int i = 0; i < 3; ++i) stores.push_back(connect());
  EXPECT_ANY_THROW(connect()->check({"a"}));
  stores.pop_back();
  EXPECT_FALSE(stores.front()->check({"a"}));
}

}  // namespace echelon::private_store_test
