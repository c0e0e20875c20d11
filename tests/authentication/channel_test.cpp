// The two ends of a channel with somebody between them, who passes on what they
// send and may read or change it.
#include "echelon/authentication/channel.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <string>

namespace echelon::authentication {
namespace {

using testing::HasSubstr;
using End = Handshake::End;

Key key_of(bool encrypts) {
  Key key = *Key::from_hex(std::string(64, '7'));
  key.set_encrypts(encrypts);
  return key;
}

class Between {
 public:
  Between(const Key& client_key, const Key& server_key) {
    int a[2], b[2];
    for (int* pair : {a, b}) {
      EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair), 0);
    }
    client = Channel(FileDescriptor(a[0]), client_key, End::client);
    server = Channel(FileDescriptor(b[0]), server_key, End::server);
    ends_[0] = FileDescriptor(a[1]);
    ends_[1] = FileDescriptor(b[1]);
  }

  // Passes on what both have sent.
  void pass_on() {
    for (int i = 0; i < 2; ++i) {
      char bytes[4096];
      ssize_t size = 0;
      while ((size = recv(ends_[i].fd(), bytes, sizeof bytes, 0)) > 0) {
        std::string text(bytes, static_cast<size_t>(size));
        seen += text;
        if (change) change(text);
        EXPECT_EQ(
            ::send(ends_[1 - i].fd(), text.data(), text.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(text.size()));
      }
    }
  }

  // Sends all of a text and returns what arrives; "error N" when that fails.
  std::string send(Channel& from, Channel& to, const std::string& text) {
    std::string arrived;
    size_t sent = 0;
    for (int turn = 0; turn < 200 && arrived.size() < text.size(); ++turn) {
      if (sent < text.size()) {
        const ssize_t size = from.send(text.data() + sent, text.size() - sent);
        if (size < 0 && errno != EAGAIN) return "error of the sender";
        sent += static_cast<size_t>(std::max<ssize_t>(size, 0));
      }
      pass_on();
      char bytes[512];
      do {
        const ssize_t size = to.receive(bytes, sizeof bytes);
        if (size == 0 || (size < 0 && errno != EAGAIN)) return "error";
        if (size > 0) arrived.append(bytes, static_cast<size_t>(size));
      } while (to.has_unread());
    }
    return arrived;
  }

  Channel client;
  Channel server;
  std::string seen;
  std::function<void(std::string&)> change;

 private:
  FileDescriptor ends_[2];
};

TEST(Channel, CarriesBothWays) {
  for (const bool encrypts : {false, true}) {
    Between between(key_of(encrypts), key_of(encrypts));
    std::string many;
    for (int i = 0; i < 20000; ++i) many += static_cast<char>('a' + i % 26);
    EXPECT_EQ(between.send(between.client, between.server, "hello"), "hello");
    EXPECT_TRUE(between.send(between.server, between.client, many) == many);
    EXPECT_EQ(between.send(between.client, between.server, "bye"), "bye");
    EXPECT_EQ(between.seen.find("hello") == std::string::npos, encrypts);
    between.client.close();
    char byte = 0;
    between.pass_on();
    EXPECT_LE(between.server.receive(&byte, 1), 0);
  }
}

TEST(Channel, ASecondSessionLooksDifferent) {
  std::string seen[2];
  for (auto& one : seen) {
    Between between(key_of(true), key_of(true));
    between.send(between.client, between.server, std::string(100, 'x'));
    one = between.seen.substr(between.seen.size() - 100);
  }
  EXPECT_NE(seen[0], seen[1]);
}

TEST(Channel, AnotherKeyIsRefused) {
  Key other = Key::random();
  other.set_encrypts(true);
  Between between(key_of(true), other);
  EXPECT_THAT(
      between.send(between.client, between.server, "hello"),
      HasSubstr("error"));
}

TEST(Channel, AChangedByteEndsIt) {
  Between between(key_of(true), key_of(true));
  EXPECT_EQ(between.send(between.client, between.server, "hello"), "hello");
  between.change = [](std::string& text) { text.back() ^= 1; };
  EXPECT_EQ(between.send(between.client, between.server, "resize 3"), "error");
}

// Keys that are made from one that encrypts do so too.
TEST(Channel, KeysKeepWhetherTheyEncrypt) {
  const Key key = key_of(true).derive("store");
  EXPECT_TRUE(key.encrypts());
  EXPECT_THAT(key.to_hex(), testing::StartsWith("tls:"));
  EXPECT_TRUE(Key::from_hex(key.to_hex())->encrypts());
  EXPECT_EQ(Key::from_hex(key.to_hex())->to_hex(), key.to_hex());
  EXPECT_FALSE(key_of(false).derive("store").encrypts());
}

}  // namespace
}  // namespace echelon::authentication
