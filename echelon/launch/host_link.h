// A connection between the launchers of two hosts. Messages are lines of JSON.
#pragma once

#include <chrono>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>

#include "echelon/authentication/channel.h"
#include "echelon/authentication/handshake.h"
#include "echelon/launch/policy.h"
#include "echelon/text/file_descriptor.h"

namespace echelon::launch {

/// A time limit from now on.
class Deadline {
 public:
  explicit Deadline(std::chrono::milliseconds span) : span_(span) {}
  TimePoint end() const { return begin_ + span_; }
  bool passed() const { return std::chrono::steady_clock::now() >= end(); }
  /// What is left, for poll(), and `at_most` if that is shorter.
  int left_ms(std::chrono::milliseconds at_most) const;
  /// "0.2 s".
  std::string seconds() const;

 private:
  TimePoint begin_ = std::chrono::steady_clock::now();
  std::chrono::milliseconds span_;
};

/// Writes a line of the launcher's to stderr.
void tell_user(const std::string& text);

/// Tells the user once, after a silence, what is waited for.
class Notice {
 public:
  /// Whether show() has something to tell.
  bool is_due() const { return !told_ && silence_.passed(); }
  void show(const std::string& awaited);

 private:
  Deadline silence_{std::chrono::seconds(3)};
  bool told_ = false;
};

/// Where a launcher listens: a number and a port.
struct Endpoint {
  std::string address;
  int port = 0;
  bool operator==(const Endpoint&) const = default;
};

/// What all links of this process have sent.
struct LinkTraffic {
  uint64_t messages = 0;
  uint64_t bytes = 0;
  uint64_t calls = 0;  // also those that nobody took
};
LinkTraffic link_traffic();

class HostLink {
 public:
  HostLink() = default;
  /// After the handshake, whose end this was.
  HostLink(
      FileDescriptor socket, const authentication::Key& key,
      authentication::Handshake::End end);

  int fd() const { return channel_.fd(); }
  bool is_open() const { return channel_.is_open(); }
  void close() { channel_.close(); }
  /// The numbers of the other end and of this one.
  const std::string& address() const { return address_; }
  const std::string& own_address() const { return own_address_; }

  /// Sends one message, without waiting. What the socket's buffer does not take
  /// is sent when receive() is called. False when the connection has ended, or
  /// the other end has not read for long.
  bool say(const nlohmann::json& message);
  /// The same for messages that are text already, a line each.
  bool say_lines(const std::string& lines);
  /// What to wait for: a message, and room for what is not sent yet.
  short events() const;
  /// Reads what has come. False when the connection has ended; messages that
  /// came before can still be taken.
  bool receive();
  /// The next message that has come; null when it is no JSON.
  std::optional<nlohmann::json> take();
  /// Whether one has come that was not taken.
  bool has_message() const { return unread_.find('\n') != std::string::npos; }
  /// When something came last.
  TimePoint heard() const { return heard_; }
  void hear_now() { heard_ = std::chrono::steady_clock::now(); }

 private:
  bool flush();

  authentication::Channel channel_;
  std::string unsent_;
  bool sent_ = false;  // something, so that encryption is set up
  std::string address_;
  std::string own_address_;
  std::string unread_;
  TimePoint heard_ = std::chrono::steady_clock::now();
};

/// An attempt to reach another launcher, which never waits: it connects, proves
/// the token, says `hello` and takes the answer.
class Call {
 public:
  enum class State { open, answered, refused, failed };

  Call(
      const Endpoint& place, const authentication::Key& key, std::string hello);

  int fd() const { return link_.is_open() ? link_.fd() : socket_.fd(); }
  /// What the call waits for.
  short events() const;
  /// Goes on as far as it can. `refused`: nobody listens there, and the host
  /// said so. `failed`: anything else, also when it takes a second to connect,
  /// or two to be answered.
  State advance();
  /// Whether the other end listens.
  bool is_connected() const { return connected_; }
  /// The answer (JSON) and the link, once it is `answered`.
  const std::string& answer() const { return answer_; }
  HostLink take_link() { return std::move(link_); }
  const Endpoint& place() const { return place_; }

 private:
  Endpoint place_;
  std::string hello_;
  Deadline deadline_;
  FileDescriptor socket_;  // until the token is proved
  int error_ = 0;          // of connecting
  bool connected_ = false;
  authentication::Key key_;
  authentication::Handshake handshake_;
  HostLink link_;  // from then on
  std::string answer_;
};

}  // namespace echelon::launch
