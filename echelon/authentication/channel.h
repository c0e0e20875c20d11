// A connection whose ends have proved that they have the same key. With a key
// that encrypts, what they send is encrypted and signed: TLS 1.3 (RFC 8446)
// with a pre-shared key made from this one, so that there are no certificates,
// and with a Diffie-Hellman exchange, so that somebody who gets the key
// later cannot read what was recorded before.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>

#include "echelon/authentication/handshake.h"
#include "echelon/authentication/key.h"
#include "echelon/text/file_descriptor.h"

namespace echelon::authentication {

class Channel {
 public:
  Channel();
  /// After the handshake, whose end this was. Throws Error when OpenSSL fails.
  Channel(FileDescriptor socket, const Key& key, Handshake::End end);
  Channel(Channel&&) noexcept;
  Channel& operator=(Channel&&) noexcept;
  ~Channel();

  int fd() const { return socket_.fd(); }
  bool is_open() const { return socket_.is_open(); }
  void close();

  /// As ::send() and ::recv() on the socket, which may be blocking or not:
  /// bytes, 0 when the other end has closed the connection, or -1 and errno.
  /// EAGAIN while an encrypted channel is being set up and the other end has to
  /// say something first: wait until there is something to read. A signal is
  /// never raised.
  ssize_t send(const void* bytes, size_t size);
  ssize_t receive(void* bytes, size_t size);
  /// Whether receive() has bytes that poll() does not tell of.
  bool has_unread() const;

 private:
  class Tls;

  FileDescriptor socket_;
  std::unique_ptr<Tls> tls_;  // null: not encrypted
};

}  // namespace echelon::authentication
