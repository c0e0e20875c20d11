#include "echelon/authentication/key.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "echelon/error.h"

namespace echelon::authentication {
namespace {

constexpr std::string_view kEncrypts = "tls:";

int digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// Without its configuration file, which the computation does not need, and
// without a handler at exit, which would run while other threads compute.
void start_openssl() {
  static const bool started =
      OPENSSL_init_crypto(
          OPENSSL_INIT_NO_LOAD_CONFIG | OPENSSL_INIT_NO_ATEXIT, nullptr) == 1;
  if (!started) throw Error("[authentication] OpenSSL does not start");
}

}  // namespace

std::string random_bytes() {
  std::string bytes(Key::kBytes, '\0');
  ssize_t size = 0;
  do {
    size = getrandom(bytes.data(), bytes.size(), 0);
  } while (size < 0 && errno == EINTR);
  if (size != static_cast<ssize_t>(bytes.size())) {
    throw Error(
        std::string("[authentication] the system gives no random numbers: ") +
        std::strerror(errno));
  }
  return bytes;
}

Key Key::random() {
  Key key;
  std::ranges::copy(random_bytes(), key.bytes_.begin());
  return key;
}

std::optional<Key> Key::from_hex(std::string_view text) {
  Key key;
  key.encrypts_ = text.starts_with(kEncrypts);
  if (key.encrypts_) text.remove_prefix(kEncrypts.size());
  if (text.size() != 2 * kBytes) return std::nullopt;
  for (size_t i = 0; i < kBytes; ++i) {
    const int high = digit(text[2 * i]);
    const int low = digit(text[2 * i + 1]);
    if (high < 0 || low < 0) return std::nullopt;
    key.bytes_[i] = static_cast<uint8_t>(high * 16 + low);
  }
  return key;
}

std::string Key::to_hex() const {
  std::string text(encrypts_ ? kEncrypts : "");
  for (const uint8_t byte : bytes_) {
    text += "0123456789abcdef"[byte / 16];
    text += "0123456789abcdef"[byte % 16];
  }
  return text;
}

std::string Key::sign(std::string_view message) const {
  start_openssl();
  std::string code(kBytes, '\0');
  unsigned size = 0;
  if (HMAC(
          EVP_sha256(), bytes_.data(), static_cast<int>(bytes_.size()),
          reinterpret_cast<const unsigned char*>(message.data()),
          message.size(), reinterpret_cast<unsigned char*>(code.data()),
          &size) == nullptr ||
      size != code.size()) {
    throw Error("[authentication] OpenSSL does not compute HMAC-SHA-256");
  }
  return code;
}

Key Key::derive(std::string_view purpose) const {
  Key key;
  std::ranges::copy(
      sign("echelon1 key\n" + std::string(purpose)), key.bytes_.begin());
  key.encrypts_ = encrypts_;
  return key;
}

bool equal_in_constant_time(std::string_view a, std::string_view b) {
  return a.size() == b.size() &&
         CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace echelon::authentication
