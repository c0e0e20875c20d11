// One page over HTTP/1.1, for programs that read it again and again, as
// Prometheus does.
//
// Whoever can connect may ask, so nothing that comes in is trusted: a request
// has few bytes and one form, connections are few and short, the page is made a
// few times a second at most, and beyond a number of connections in a second
// the others wait for the next.
#pragma once

#include <poll.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "echelon/text/file_descriptor.h"

namespace echelon::monitoring {

/// The HTTP status that answers these first bytes of a connection, where the
/// only page is at `path`; nothing while more bytes are needed.
std::optional<int> status_of(std::string_view request, std::string_view path);

class PageServer {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr size_t kMostRequestBytes = 4096;
  static constexpr size_t kMostConnections = 32;
  static constexpr int kMostInASecond = 100;
  static constexpr std::chrono::milliseconds kPageAge{200};
  /// From the connection to the end of the answer.
  static constexpr std::chrono::seconds kMostTime{5};

  /// `listener` listens and does not wait. `make` returns the page at `path`;
  /// it throws nothing.
  PageServer(
      FileDescriptor listener, std::string path,
      std::function<std::string()> make);

  /// Waits at most so long for what comes, and answers it.
  void serve(std::chrono::milliseconds at_most);
  size_t num_connections() const { return connections_.size(); }

 private:
  struct Connection {
    FileDescriptor socket;
    Clock::time_point began;
    std::string request;
    std::string head;                         // of the answer
    std::shared_ptr<const std::string> body;  // null: none yet
    size_t sent = 0;
    bool ended = false;  // the answer is sent
  };

  void accept_some();
  /// False when the connection is over.
  bool advance(Connection& connection);
  bool read(Connection& connection);
  bool write(Connection& connection);
  void answer(Connection& connection, int status);

  FileDescriptor listener_;
  const std::string path_;
  const std::function<std::string()> make_;
  std::vector<Connection> connections_;  // the oldest first
  std::shared_ptr<const std::string> page_;
  Clock::time_point made_{};
  Clock::time_point second_{};  // when counting began
  int in_second_ = 0;           // connections since then
};

}  // namespace echelon::monitoring
