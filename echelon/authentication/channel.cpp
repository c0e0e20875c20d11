#include "echelon/authentication/channel.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <string>
#include <utility>

#include "echelon/error.h"

namespace echelon::authentication {
namespace {

constexpr char kCipher[] = "TLS_AES_128_GCM_SHA256";
constexpr unsigned char kCipherNumber[] = {0x13, 0x01};
constexpr char kIdentity[] = "echelon";

[[noreturn]] void fail() {
  throw Error("[authentication] OpenSSL does not start TLS 1.3");
}

// The socket's own calls, without SIGPIPE.
int write_socket(BIO* bio, const char* bytes, int size) {
  const auto fd =
      static_cast<int>(reinterpret_cast<intptr_t>(BIO_get_data(bio)));
  BIO_clear_retry_flags(bio);
  const ssize_t sent =
      ::send(fd, bytes, static_cast<size_t>(size), MSG_NOSIGNAL);
  if (sent < 0 && (errno == EAGAIN || errno == EINTR)) {
    BIO_set_retry_write(bio);
  }
  return static_cast<int>(sent);
}

int read_socket(BIO* bio, char* bytes, int size) {
  const auto fd =
      static_cast<int>(reinterpret_cast<intptr_t>(BIO_get_data(bio)));
  BIO_clear_retry_flags(bio);
  const ssize_t got = ::recv(fd, bytes, static_cast<size_t>(size), 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) BIO_set_retry_read(bio);
  return static_cast<int>(got);
}

long control_socket(BIO*, int command, long, void*) {
  return command == BIO_CTRL_FLUSH ? 1 : 0;
}

const BIO_METHOD* socket_method() {
  static BIO_METHOD* const method = [] {
    BIO_METHOD* made = BIO_meth_new(
        BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "echelon socket");
    if (made == nullptr || BIO_meth_set_write(made, write_socket) != 1 ||
        BIO_meth_set_read(made, read_socket) != 1 ||
        BIO_meth_set_ctrl(made, control_socket) != 1) {
      fail();
    }
    return made;
  }();
  return method;
}

// The session that both ends make of the key.
SSL_SESSION* session_of(SSL* ssl) {
  const auto& secret = *static_cast<const std::string*>(SSL_get_app_data(ssl));
  SSL_SESSION* session = SSL_SESSION_new();
  const SSL_CIPHER* cipher = SSL_CIPHER_find(ssl, kCipherNumber);
  if (session == nullptr || cipher == nullptr ||
      SSL_SESSION_set1_master_key(
          session, reinterpret_cast<const unsigned char*>(secret.data()),
          secret.size()) != 1 ||
      SSL_SESSION_set_cipher(session, cipher) != 1 ||
      SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) != 1) {
    SSL_SESSION_free(session);
    return nullptr;
  }
  return session;
}

int use_session(
    SSL* ssl, const EVP_MD* digest, const unsigned char** identity,
    size_t* size, SSL_SESSION** session) {
  *session = nullptr;
  if (digest != nullptr && EVP_MD_get_type(digest) != NID_sha256) return 1;
  *session = session_of(ssl);
  *identity = reinterpret_cast<const unsigned char*>(kIdentity);
  *size = sizeof kIdentity - 1;
  return *session != nullptr ? 1 : 0;
}

int find_session(
    SSL* ssl, const unsigned char* identity, size_t size,
    SSL_SESSION** session) {
  *session = nullptr;
  if (std::string(reinterpret_cast<const char*>(identity), size) != kIdentity) {
    return 1;
  }
  *session = session_of(ssl);
  return *session != nullptr ? 1 : 0;
}

// Without certificates, a handshake without the key fails: the server has none
// to show, and the client trusts none.
SSL_CTX* context() {
  static SSL_CTX* const made = [] {
    OPENSSL_init_ssl(
        OPENSSL_INIT_NO_LOAD_CONFIG | OPENSSL_INIT_NO_ATEXIT, nullptr);
    SSL_CTX* one = SSL_CTX_new(TLS_method());
    if (one == nullptr ||
        SSL_CTX_set_min_proto_version(one, TLS1_3_VERSION) != 1 ||
        SSL_CTX_set_ciphersuites(one, kCipher) != 1 ||
        SSL_CTX_set_num_tickets(one, 0) != 1) {
      fail();
    }
    SSL_CTX_set_session_cache_mode(one, SSL_SESS_CACHE_OFF);
    // Messages have lengths, so that one that is cut off is seen as such.
    SSL_CTX_set_options(one, SSL_OP_IGNORE_UNEXPECTED_EOF);
    SSL_CTX_set_psk_use_session_callback(one, use_session);
    SSL_CTX_set_psk_find_session_callback(one, find_session);
    SSL_CTX_set_mode(
        one,
        SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    return one;
  }();
  return made;
}

}  // namespace

class Channel::Tls {
 public:
  Tls(int fd, const Key& key, Handshake::End end)
      : secret_(key.sign("echelon1 TLS 1.3 pre-shared key")),
        ssl_(SSL_new(context())) {
    BIO* bio = BIO_new(socket_method());
    if (ssl_ == nullptr || bio == nullptr) fail();
    BIO_set_data(bio, reinterpret_cast<void*>(static_cast<intptr_t>(fd)));
    BIO_set_init(bio, 1);
    SSL_set_bio(ssl_, bio, bio);
    SSL_set_app_data(ssl_, &secret_);
    if (end == Handshake::End::client) {
      SSL_set_verify(ssl_, SSL_VERIFY_PEER, nullptr);
      SSL_set_connect_state(ssl_);
    } else {
      SSL_set_accept_state(ssl_);
    }
  }
  ~Tls() { SSL_free(ssl_); }
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  ssize_t send(const void* bytes, size_t size) {
    return call(
        [&](size_t& done) { return SSL_write_ex(ssl_, bytes, size, &done); });
  }
  ssize_t receive(void* bytes, size_t size) {
    return call(
        [&](size_t& done) { return SSL_read_ex(ssl_, bytes, size, &done); });
  }
  bool has_unread() const { return SSL_has_pending(ssl_) == 1; }

 private:
  template <typename Action>
  ssize_t call(const Action& action) {
    ERR_clear_error();
    errno = 0;
    size_t done = 0;
    const int result = action(done);
    if (result == 1) return static_cast<ssize_t>(done);
    switch (SSL_get_error(ssl_, result)) {
      case SSL_ERROR_WANT_READ:
      case SSL_ERROR_WANT_WRITE:
        errno = EAGAIN;
        return -1;
      case SSL_ERROR_ZERO_RETURN:
        return 0;
      case SSL_ERROR_SYSCALL:
        if (errno == 0) return 0;
        return -1;
      default:
        errno = EPROTO;
        return -1;
    }
  }

  const std::string secret_;
  SSL* const ssl_;
};

Channel::Channel() = default;
Channel::Channel(FileDescriptor socket, const Key& key, Handshake::End end)
    : socket_(std::move(socket)) {
  if (key.encrypts()) {
    tls_ = std::make_unique<Tls>(socket_.fd(), key, end);
  }
}
Channel::Channel(Channel&&) noexcept = default;
Channel& Channel::operator=(Channel&&) noexcept = default;
Channel::~Channel() = default;

void Channel::close() {
  tls_.reset();
  socket_.close();
}

ssize_t Channel::send(const void* bytes, size_t size) {
  return tls_ ? tls_->send(bytes, size)
              : ::send(socket_.fd(), bytes, size, MSG_NOSIGNAL);
}

ssize_t Channel::receive(void* bytes, size_t size) {
  return tls_ ? tls_->receive(bytes, size)
              : ::recv(socket_.fd(), bytes, size, 0);
}

bool Channel::has_unread() const {
  return tls_ && tls_->has_unread();
}

}  // namespace echelon::authentication
