// Checksums of objects. Private to this folder.
#pragma once

#include <openssl/evp.h>

#include <cstddef>
#include <span>
#include <string>

namespace echelon::storage {

using Bytes = std::span<const std::byte>;

inline Bytes bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

std::string hex_text(std::span<const unsigned char> digest);
/// In hexadecimal.
std::string digest_of(const EVP_MD* kind, Bytes bytes);
/// CRC-32 as S3's headers have it: big-endian, in base 64.
std::string crc_of(Bytes bytes);

}  // namespace echelon::storage
