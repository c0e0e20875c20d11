// Where a launcher takes the connections of other hosts. Anyone may connect,
// and must not keep the hosts out: a connection that proves nothing is closed
// after a while, or as soon as there are too many of them, and a host that
// loses its connection in that way comes again.
#pragma once

#include <poll.h>

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "echelon/authentication/handshake.h"
#include "echelon/authentication/strangers.h"
#include "echelon/authentication/token.h"
#include "echelon/launch/host_link.h"
#include "echelon/launch/job_start.h"

namespace echelon::launch {

class HostListener {
 public:
  /// Listens on `socket`. Throws ConfigError when the port is in use.
  ///
  ///   most_hosts  connections that are no strangers
  ///   patience    a quarter of it is the most that a connection may take to
  ///               prove the token, and then to say what it wants
  HostListener(
      BoundSocket socket, authentication::Token token, int most_hosts,
      std::chrono::milliseconds patience);

  const Endpoint& place() const { return place_; }

  /// A host that has proved the token, and its first message.
  struct Caller {
    HostLink link;
    std::string message;  // JSON
  };
  void add_files(std::vector<pollfd>& files) const;
  /// Takes what has come, given what add_files() added last, and closes what is
  /// too late.
  std::vector<Caller> serve(const pollfd* files);
  /// Closes the connections that have not proved the token: hosts come again.
  void close_strangers();
  /// Says why a host that has proved the token is not taken.
  static void refuse(HostLink& link, const std::string& reason);

 private:
  struct Newcomer {
    FileDescriptor socket;  // until it has proved the token
    HostLink link;          // from then on
    std::optional<authentication::Handshake> handshake;
    Deadline silence;  // until when it must have said more
    int fd() const { return link.is_open() ? link.fd() : socket.fd(); }
  };

  void accept_newcomer();
  /// True when it is no newcomer any more: it is a caller, it was refused, or
  /// it has left.
  bool advance(Newcomer& newcomer, std::vector<Caller>& callers);
  bool take_proof(Newcomer& newcomer);
  void turn_away(Newcomer& newcomer, const std::string& reason);

  const authentication::Token token_;
  const size_t most_hosts_;
  const std::chrono::milliseconds proof_timeout_;
  const std::chrono::milliseconds hello_timeout_;
  authentication::Strangers strangers_;
  FileDescriptor listener_;
  Endpoint place_;
  std::optional<Deadline> full_;     // no connection is taken until then
  std::vector<Newcomer> newcomers_;  // in the order in which they came
};

}  // namespace echelon::launch
