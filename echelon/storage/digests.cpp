#include "echelon/storage/digests.h"

#include <zlib.h>

#include <cstdint>

#include "echelon/text/format.h"

namespace echelon::storage {

std::string hex_text(std::span<const unsigned char> digest) {
  std::string hex;
  for (const unsigned char byte : digest) {
    hex += format("{:02x}", unsigned{byte});
  }
  return hex;
}

std::string digest_of(const EVP_MD* kind, Bytes bytes) {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned size = 0;
  EVP_Digest(bytes.data(), bytes.size(), digest, &size, kind, nullptr);
  return hex_text(std::span(digest).first(size));
}

std::string crc_of(Bytes bytes) {
  const auto sum = static_cast<uint32_t>(
      ::crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
  const unsigned char big[4] = {
      static_cast<unsigned char>(sum >> 24),
      static_cast<unsigned char>(sum >> 16),
      static_cast<unsigned char>(sum >> 8), static_cast<unsigned char>(sum)};
  unsigned char text[16];
  EVP_EncodeBlock(text, big, sizeof big);
  return reinterpret_cast<const char*>(text);
}

}  // namespace echelon::storage
