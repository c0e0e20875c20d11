#include "echelon/checkpoint/files/checksum_stream.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "echelon/checkpoint/files/checksum_wide.h"

namespace echelon {

struct ChecksumStream::State {
  XXH3_state_t xxh;  // aligned to 64 bytes: new sees to it
};

ChecksumStream::ChecksumStream() : state_(std::make_unique<State>()) {
  XXH3_128bits_reset(&state_->xxh);
}
ChecksumStream::~ChecksumStream() = default;

void ChecksumStream::update(const void* bytes, size_t size) {
  static const ChecksumUpdate wide = wide_checksum_update();
  if (wide != nullptr) return wide(&state_->xxh, bytes, size);
  XXH3_128bits_update(&state_->xxh, bytes, size);
}

std::string ChecksumStream::digest() {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(&state_->xxh));
  XXH3_128bits_reset(&state_->xxh);
  std::string text;
  for (const unsigned char byte : canonical.digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

}  // namespace echelon
