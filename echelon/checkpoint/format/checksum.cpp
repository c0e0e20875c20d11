#include "echelon/checkpoint/format/checksum.h"

// On x86 the library chooses the widest vector instructions that the processor
// has: AVX2 checks twice as many bytes a second as SSE2.
#ifdef __x86_64__
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

#include <new>

#include "echelon/text/format.h"

namespace echelon {
namespace {

std::string digits_of(const XXH128_hash_t& hash) {
  return format("{:016x}{:016x}", hash.high64, hash.low64);
}

}  // namespace

std::string checksum(const void* bytes, size_t size) {
  return digits_of(XXH3_128bits(bytes, size));
}

ChecksumStream::ChecksumStream() : state_(XXH3_createState()) {
  if (!state_) throw std::bad_alloc();
  XXH3_128bits_reset(state_.get());
}

void ChecksumStream::Free::operator()(XXH3_state_s* state) const {
  XXH3_freeState(state);
}

void ChecksumStream::update(const void* bytes, size_t size) {
  XXH3_128bits_update(state_.get(), bytes, size);
}

std::string ChecksumStream::digest() {
  const auto hash = XXH3_128bits_digest(state_.get());
  XXH3_128bits_reset(state_.get());
  return digits_of(hash);
}

}  // namespace echelon
