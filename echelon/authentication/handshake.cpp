// Four messages, where a proof is the HMAC of who makes it and both nonces:
//
//   client: 8 bytes that name port and version, its nonce of 32 bytes
//   server: the same 8 bytes, its nonce, its proof
//   client: its proof
//   server: 1 byte, which tells that it took the proof
//
// The nonces make every handshake another one, so that a recorded one is of no
// use. A proof names its maker, so that none can be sent back to its maker. A
// client that meets another key sends zeros for its proof: the server then
// learns why the connection ends, and nothing else. The last byte is for a
// client whose connection the server closes to make room, before it has read
// the proof: such a client may connect again.
#include "echelon/authentication/handshake.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>

namespace echelon::authentication {
namespace {

constexpr size_t kMagic = 8;
constexpr size_t kNonce = 32;
constexpr size_t kProof = Key::kBytes;
constexpr char kTaken = '+';

// The last character is the version of the handshake; T: TLS follows it.
std::string_view magic(Port port, bool encrypts) {
  switch (port) {
    case Port::launchers:
      return encrypts ? "ECHhostT" : "ECHhost1";
    case Port::store:
      return encrypts ? "ECHstorT" : "ECHstor1";
    case Port::memory:
      return encrypts ? "ECHmemoT" : "ECHmemo1";
    case Port::pool:
      return encrypts ? "ECHpoolT" : "ECHpool1";
  }
  return "";
}

}  // namespace

Handshake::Handshake(const Key& key, Port port, End end)
    : key_(key),
      port_(port),
      nonce_(random_bytes()),
      awaits_(end == End::client ? start : hello) {}

State Handshake::advance(int fd) {
  if (awaits_ == start) {
    awaits_ = answer;
    if (!send_all(fd, std::string(magic(port_, key_.encrypts())) + nonce_)) {
      return State::closed;
    }
  }
  const size_t wanted = awaits_ == hello    ? kMagic + kNonce
                        : awaits_ == answer ? kMagic + kNonce + kProof
                        : awaits_ == proof  ? kProof
                                            : 1;
  std::array<char, kMagic + kNonce + kProof> bytes;
  const ssize_t size =
      recv(fd, bytes.data(), wanted - received_.size(), MSG_DONTWAIT);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return State::open;
  if (size <= 0) return State::closed;
  received_.append(bytes.data(), static_cast<size_t>(size));
  if (awaits_ == hello || awaits_ == answer) {
    const size_t known = std::min(received_.size(), kMagic);
    if (received_.compare(0, known, magic(port_, key_.encrypts()), 0, known) !=
        0) {
      return State::other_program;
    }
  }
  if (received_.size() < wanted) return State::open;
  if (awaits_ == hello) return take_hello(fd);
  if (awaits_ == answer) return take_answer(fd);
  if (awaits_ == proof) return take_proof(fd);
  return received_[0] == kTaken ? State::proved : State::other_program;
}

State Handshake::take_hello(int fd) {
  nonces_ = received_.substr(kMagic) + nonce_;
  received_.clear();
  awaits_ = proof;
  const std::string answer = std::string(magic(port_, key_.encrypts())) +
                             nonce_ + proof_of(End::server);
  return send_all(fd, answer) ? State::open : State::closed;
}

State Handshake::take_answer(int fd) {
  nonces_ = nonce_ + received_.substr(kMagic, kNonce);
  const bool same = equal_in_constant_time(
      received_.substr(kMagic + kNonce), proof_of(End::server));
  const std::string own =
      same ? proof_of(End::client) : std::string(kProof, '\0');
  if (!send_all(fd, own)) return State::closed;
  received_.clear();
  awaits_ = end;
  return same ? State::open : State::other_key;
}

State Handshake::take_proof(int fd) const {
  if (!equal_in_constant_time(received_, proof_of(End::client))) {
    return State::other_key;
  }
  return send_all(fd, {kTaken}) ? State::proved : State::closed;
}

std::string Handshake::proof_of(End end) const {
  return key_.sign(
      std::string(magic(port_, key_.encrypts())) +
      (end == End::client ? " client" : " server") + nonces_);
}

// A connection that has sent less than its buffer takes all of it.
bool Handshake::send_all(int fd, const std::string& bytes) {
  return send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(bytes.size());
}

State prove(
    int fd, const Key& key, Port port,
    std::chrono::steady_clock::time_point deadline, Handshake::End end) {
  using std::chrono::milliseconds;
  Handshake handshake(key, port, end);
  State state = handshake.advance(fd);
  while (state == State::open) {
    const auto left = std::chrono::ceil<milliseconds>(
        deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) break;
    pollfd file{fd, POLLIN, 0};
    poll(&file, 1, static_cast<int>(std::min<int64_t>(left.count(), 1000)));
    if (file.revents != 0) state = handshake.advance(fd);
  }
  return state;
}

}  // namespace echelon::authentication
