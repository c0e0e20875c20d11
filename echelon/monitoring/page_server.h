// A few pages over HTTP/1.1, for browsers and for programs that read one again
// and again, as Prometheus does.
//
// Whoever can connect may ask, so nothing that comes in is trusted: a request
// has few bytes and one form, connections are few and short, a page is made a
// few times a second at most, and beyond a number of connections in a second
// the others wait for the next.
#pragma once

#include <poll.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "echelon/text/file_descriptor.h"

namespace echelon::monitoring {

struct PageRequest {
  int status = 200;  // else it is refused for its form
  std::string path, query;
  /// By name, in small letters; what is said twice counts the first time.
  std::map<std::string, std::string> headers;
};

/// The request that these first bytes of a connection are; nothing while more
/// are needed.
std::optional<PageRequest> read_request(std::string_view bytes);

struct ServedPage {
  std::string path;                   // "/metrics"
  std::string type;                   // of its content
  std::function<std::string()> make;  // throws nothing
};

/// An answer in place of a page.
struct PageRefusal {
  int status = 401;
  std::string headers;  // more lines, each with its end
  std::string text;     // empty: one that fits the status
};

/// Who may not have a page, whatever its path; nothing: who asks may.
using PageGuard = std::function<std::optional<PageRefusal>(const PageRequest&)>;

class PageServer {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr size_t kMostRequestBytes = 4096;
  static constexpr size_t kMostConnections = 32;
  static constexpr int kMostInASecond = 100;
  static constexpr std::chrono::milliseconds kPageAge{200};
  /// From the connection to the end of the answer.
  static constexpr std::chrono::seconds kMostTime{5};

  /// `listener` listens and does not wait. Without a guard everybody who
  /// reaches it may have the pages.
  PageServer(
      FileDescriptor listener, std::vector<ServedPage> pages,
      PageGuard guard = {});

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
  void answer(Connection& connection, const PageRequest& request);
  void refuse(Connection& connection, PageRefusal refusal) const;

  struct Made {
    ServedPage page;
    std::shared_ptr<const std::string> text = {};  // null: not made yet
    Clock::time_point when = {};
  };

  FileDescriptor listener_;
  std::vector<Made> pages_;
  const PageGuard guard_;
  std::vector<Connection> connections_;  // the oldest first
  Clock::time_point second_{};           // when counting began
  int in_second_ = 0;                    // connections since then
};

}  // namespace echelon::monitoring
