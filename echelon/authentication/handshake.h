// The first bytes of a connection: both ends prove that they have the same key,
// without sending it. Whoever listens to a handshake cannot use it for another
// one. What follows on the connection is neither encrypted nor signed.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

#include "echelon/authentication/key.h"

namespace echelon::authentication {

/// Where two ends meet. A proof for one is none for the other.
enum class Port {
  launchers,  // the launchers of a job's hosts
  store,      // the ranks' key-value store
  memory,     // a host's checkpoints in memory
  pool,       // the commands of a pool
};

enum class State {
  open,           // bytes of the other end are missing
  proved,         // the other end has the key
  closed,         // the other end closed the connection, or it broke
  other_program,  // the other end speaks something else, or another version
  other_key,      // the other end speaks this, but has another key
};

/// One end of one connection.
class Handshake {
 public:
  enum class End { client, server };

  Handshake(const Key& key, Port port, End end);

  /// Reads what has come on the socket `fd`, and answers. Call it first when
  /// the connection is made, and then whenever there is something to read,
  /// while it returns `open`. Does not wait, and reads no byte that comes after
  /// the handshake. A server has sent nothing to a connection that is not one
  /// of this protocol.
  State advance(int fd);

 private:
  State take_hello(int fd);
  State take_answer(int fd);
  State take_proof(int fd) const;
  std::string proof_of(End end) const;
  static bool send_all(int fd, const std::string& bytes);

  Key key_;
  Port port_;
  std::string nonce_;     // of this end
  std::string nonces_;    // the client's and then the server's
  std::string received_;  // of the message that comes
  enum { start, hello, answer, proof, end } awaits_;
};

/// One end's whole handshake on the socket `fd`; `open` when it was not over
/// at `deadline`.
State prove(
    int fd, const Key& key, Port port,
    std::chrono::steady_clock::time_point deadline,
    Handshake::End end = Handshake::End::client);

}  // namespace echelon::authentication
