#include "echelon/authentication/handshake.h"

#include <gmock/gmock.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <vector>

namespace echelon::authentication::handshake_test {

using End = Handshake::End;

/// Two ends of a connection, and what the test takes from it or puts into it.
class Pair {
 public:
  Pair() { EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends_), 0); }
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;
  ~Pair() {
    hang_up();
    close(ends_[1]);
  }
  int client() const { return ends_[0]; }
  int server() const { return ends_[1]; }
  void hang_up() {
    if (ends_[0] >= 0) close(ends_[0]);
    ends_[0] = -1;
  }
  void put(const std::string& bytes) const {
    EXPECT_EQ(
        send(ends_[0], bytes.data(), bytes.size(), 0),
        static_cast<ssize_t>(bytes.size()));
  }
  /// All that has come.
  static std::string taken(int fd) {
    char bytes[4096];
    const ssize_t size = recv(fd, bytes, sizeof bytes, MSG_DONTWAIT);
    return {bytes, size < 0 ? 0 : static_cast<size_t>(size)};
  }

 private:
  int ends_[2] = {-1, -1};
};

struct Ended {
  State client;
  State server;
  std::vector<std::string> sent;  // by the client, by the server, in turn
};

/// A handshake of two ends, whose messages the test reads on their way.
Ended meet(
    const Key& client_key, const Key& server_key,
    Port client_port = Port::launchers) {
  const Pair left;   // the client and the test
  const Pair right;  // the test and the server
  Handshake client(client_key, client_port, End::client);
  Handshake server(server_key, Port::launchers, End::server);
  Ended ended{State::open, State::open, {}};
  const auto over = [](State state) {
    return state != State::open && state != State::proved;
  };
  while (ended.client == State::open) {
    ended.client = client.advance(left.client());
    if (ended.client == State::proved) break;
    ended.sent.push_back(Pair::taken(left.server()));
    right.put(ended.sent.back());
    ended.server = server.advance(right.server());
    if (over(ended.client) || over(ended.server)) break;
    ended.sent.push_back(Pair::taken(right.client()));
    const std::string& bytes = ended.sent.back();
    EXPECT_EQ(
        write(left.server(), bytes.data(), bytes.size()),
        static_cast<ssize_t>(bytes.size()));
  }
  return ended;
}

TEST(Handshake, BothEndsProveTheSameKey) {
  const Key key = Key::random();
  const Ended ended = meet(key, key);
  EXPECT_EQ(ended.client, State::proved);
  EXPECT_EQ(ended.server, State::proved);
}

TEST(Handshake, NeitherEndTakesAnotherKey) {
  const Ended ended = meet(Key::random(), Key::random());
  EXPECT_EQ(ended.client, State::other_key);
  EXPECT_EQ(ended.server, State::other_key);
  // The client does not prove its key to who has not proved it.
  EXPECT_EQ(ended.sent.back(), std::string(32, '\0'));
}

TEST(Handshake, TheKeyIsNotSent) {
  const Key key = Key::random();
  std::string raw;
  for (int i = 0; i < 32; ++i) {
    raw += static_cast<char>(std::stoi(
        key.to_hex().substr(static_cast<size_t>(2 * i), 2), nullptr, 16));
  }
  for (const auto& message : meet(key, key).sent) {
    EXPECT_EQ(message.find(raw), std::string::npos);
    EXPECT_EQ(message.find(key.to_hex()), std::string::npos);
  }
}

TEST(Handshake, AProofForOnePortIsNoneForAnother) {
  const Key key = Key::random();
  EXPECT_EQ(meet(key, key, Port::store).server, State::other_program);
}

// What follows the handshake belongs to the program.
TEST(Handshake, ReadsNothingThatFollows) {
  const Key key = Key::random();
  const Pair pair;
  Handshake client(key, Port::store, End::client);
  Handshake server(key, Port::store, End::server);
  EXPECT_EQ(client.advance(pair.client()), State::open);
  EXPECT_EQ(server.advance(pair.server()), State::open);
  EXPECT_EQ(client.advance(pair.client()), State::open);
  pair.put("next");
  EXPECT_EQ(server.advance(pair.server()), State::proved);
  EXPECT_EQ(Pair::taken(pair.server()), "next");
  EXPECT_EQ(write(pair.server(), "more", 4), 4);
  EXPECT_EQ(client.advance(pair.client()), State::proved);
  EXPECT_EQ(Pair::taken(pair.client()), "more");
}

TEST(Handshake, ComesInAnyPieces) {
  const Key key = Key::random();
  const Pair left;
  const Pair right;
  Handshake client(key, Port::store, End::client);
  Handshake server(key, Port::store, End::server);
  State state = client.advance(left.client());
  State other = State::open;
  for (int i = 0; i < 4 && state == State::open; ++i) {
    for (const char c : Pair::taken(left.server())) {
      EXPECT_EQ(other, State::open);
      right.put({c});
      other = server.advance(right.server());
    }
    for (const char c : Pair::taken(right.client())) {
      EXPECT_EQ(state, State::open);
      EXPECT_EQ(write(left.server(), &c, 1), 1);
      state = client.advance(left.client());
    }
  }
  EXPECT_EQ(other, State::proved);
  EXPECT_EQ(state, State::proved);
}

TEST(Handshake, AnotherProgramIsToldNothing) {
  for (const std::string first :
       {"GET / HTTP/1.1\r\n\r\n", "{\"protocol\": 1}\n", "ECHhost2",
        "\0\0\0"}) {
    const Pair pair;
    Handshake server(Key::random(), Port::launchers, End::server);
    pair.put(first.empty() ? std::string(8, '\0') : first);
    EXPECT_EQ(server.advance(pair.server()), State::other_program) << first;
    EXPECT_EQ(Pair::taken(pair.client()), "");
  }
}

TEST(Handshake, AClosedConnectionIsNoProof) {
  Pair pair;
  Handshake server(Key::random(), Port::launchers, End::server);
  pair.put("ECHhost1");
  EXPECT_EQ(server.advance(pair.server()), State::open);
  pair.hang_up();
  EXPECT_EQ(server.advance(pair.server()), State::closed);
}

// A server makes room for others so.
TEST(Handshake, AClientKnowsWhetherItsProofWasTaken) {
  const Key key = Key::random();
  Pair pair;
  Handshake client(key, Port::store, End::client);
  Handshake server(key, Port::store, End::server);
  EXPECT_EQ(client.advance(pair.client()), State::open);
  EXPECT_EQ(server.advance(pair.server()), State::open);
  EXPECT_EQ(client.advance(pair.client()), State::open);
  ::shutdown(pair.server(), SHUT_RDWR);
  EXPECT_EQ(client.advance(pair.client()), State::closed);
}

TEST(Handshake, ARecordedOneIsNoProof) {
  const Key key = Key::random();
  const Ended recorded = meet(key, key);
  ASSERT_EQ(recorded.server, State::proved);
  const Pair pair;
  Handshake server(key, Port::launchers, End::server);
  pair.put(recorded.sent[0]);
  EXPECT_EQ(server.advance(pair.server()), State::open);
  pair.put(recorded.sent[2]);
  EXPECT_EQ(server.advance(pair.server()), State::other_key);
  // Nor is it to a client.
  const Pair other;
  Handshake client(key, Port::launchers, End::client);
  EXPECT_EQ(client.advance(other.client()), State::open);
  EXPECT_EQ(
      write(other.server(), recorded.sent[1].data(), recorded.sent[1].size()),
      static_cast<ssize_t>(recorded.sent[1].size()));
  EXPECT_EQ(client.advance(other.client()), State::other_key);
}

TEST(Handshake, AnEndsOwnProofIsNone) {
  const Key key = Key::random();
  const Pair pair;
  Handshake server(key, Port::launchers, End::server);
  pair.put("ECHhost1" + std::string(32, 'n'));
  EXPECT_EQ(server.advance(pair.server()), State::open);
  const std::string answer = Pair::taken(pair.client());
  ASSERT_EQ(answer.size(), 72u);
  pair.put(answer.substr(40));
  EXPECT_EQ(server.advance(pair.server()), State::other_key);
}

TEST(Handshake, AClientWaitsUntilItsDeadline) {
  const Pair pair;
  EXPECT_EQ(
      prove(
          pair.client(), Key::random(), Port::store,
          std::chrono::steady_clock::now() + std::chrono::milliseconds(20)),
      State::open);
}

}  // namespace echelon::authentication::handshake_test
