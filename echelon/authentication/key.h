// A secret key of 256 bits, and what is computed with it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace echelon::authentication {

/// 32 bytes from the system's random source, which no one can foresee.
std::string random_bytes();

class Key {
 public:
  static constexpr size_t kBytes = 32;

  static Key random();
  /// Of 64 hexadecimal digits; nothing of any other text.
  static std::optional<Key> from_hex(std::string_view text);
  /// With "tls:" in front of a key that encrypts, as from_hex() takes it.
  std::string to_hex() const;

  /// HMAC-SHA-256 (RFC 2104) of `message`: 32 bytes that only who has the key
  /// can compute, and that tell nothing about it.
  std::string sign(std::string_view message) const;
  /// A key for one purpose. Who has it cannot compute this one. It encrypts if
  /// this one does.
  Key derive(std::string_view purpose) const;

  /// Whether what follows the proof of this key is encrypted (channel.h). Both
  /// ends must say the same; else each takes the other for another program.
  bool encrypts() const { return encrypts_; }
  void set_encrypts(bool encrypts) { encrypts_ = encrypts; }

 private:
  std::array<uint8_t, kBytes> bytes_{};
  bool encrypts_ = false;
};

/// Compares in a time that does not depend on where they differ.
bool equal_in_constant_time(std::string_view a, std::string_view b);

}  // namespace echelon::authentication
