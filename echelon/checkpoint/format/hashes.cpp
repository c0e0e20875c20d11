#include "echelon/checkpoint/format/hashes.h"

// On x86 the library chooses the widest vector instructions that the processor
// has: AVX2 checks twice as many bytes a second as SSE2.
#ifdef __x86_64__
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

#include <cstring>
#include <new>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

std::string digits_of(const XXH128_hash_t& hash) {
  return format("{:016x}{:016x}", hash.high64, hash.low64);
}

constexpr uint64_t kStep = 0x9e3779b97f4a7c15;
constexpr uint64_t kMix = 0xd6e8feb86659fd93;
// Processors prefetch within one page only; prefetching further doubles the
// speed on data that no cache holds.
constexpr size_t kAheadBytes = 2048;

/// `count` elements that follow each other, the first of them number `index`.
template <typename Bits>
void add_row(
    uint64_t index, const std::byte* bytes, int64_t count, ContentHash& hash) {
  uint64_t key = (index + 1) * kStep;
  uint64_t first = 0;
  uint64_t second = 0;
  for (int64_t i = 0; i < count; ++i) {
    const std::byte* at = bytes + static_cast<size_t>(i) * sizeof(Bits);
    if (i % (64 / sizeof(Bits)) == 0) __builtin_prefetch(at + kAheadBytes);
    Bits bits;
    std::memcpy(&bits, at, sizeof bits);
    uint64_t z = key ^ bits;
    z = (z ^ z >> 32) * kMix;
    z = (z ^ z >> 32) * kMix;
    z ^= z >> 32;
    first += z;
    second += (key | 1) * z;
    key += kStep;
  }
  hash[0] += first;
  hash[1] += second;
}

template <typename Bits>
ContentHash hash_box(
    const std::vector<int64_t>& shape, const Box& box, const std::byte* bytes) {
  ContentHash hash{};
  const int64_t numel = box.numel();
  if (numel == 0) return hash;
  // Inner dimensions that the box spans completely belong to its rows.
  size_t outer = shape.size();
  int64_t row = 1;
  while (outer > 0) {
    row *= box.sizes[--outer];
    if (box.sizes[outer] != shape[outer]) break;
  }
  std::vector<int64_t> index(box.offset);
  for (int64_t done = 0; done < numel; done += row) {
    uint64_t number = 0;
    for (size_t d = 0; d < shape.size(); ++d) {
      number = number * static_cast<uint64_t>(shape[d]) +
               static_cast<uint64_t>(index[d]);
    }
    add_row<Bits>(
        number, bytes + static_cast<size_t>(done) * sizeof(Bits), row, hash);
    size_t d = outer;
    while (d > 0 && ++index[d - 1] == box.offset[d - 1] + box.sizes[d - 1]) {
      --d;
      index[d] = box.offset[d];
    }
  }
  return hash;
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

std::string sampled_checksum(const void* bytes, size_t size) {
  constexpr size_t kBlock = size_t{4} << 20, kBlocks = 64;
  const auto* from = static_cast<const std::byte*>(bytes);
  ChecksumStream sum;
  sum.update(&size, sizeof(size));
  if (size <= kBlocks * kBlock) {
    sum.update(from, size);
    return sum.digest();
  }
  for (size_t i = 0; i < kBlocks; ++i) {
    sum.update(from + (size - kBlock) / (kBlocks - 1) * i, kBlock);
  }
  return sum.digest();
}

ContentHash hash_elements(
    const std::vector<int64_t>& shape, const Box& box, const std::byte* bytes,
    size_t element_bytes) {
  switch (element_bytes) {
    case 1:
      return hash_box<uint8_t>(shape, box, bytes);
    case 2:
      return hash_box<uint16_t>(shape, box, bytes);
    case 4:
      return hash_box<uint32_t>(shape, box, bytes);
    case 8:
      return hash_box<uint64_t>(shape, box, bytes);
    default:
      break;
  }
  throw Error(format(
      "hash_elements: elements of {} bytes; 1, 2, 4 and 8 are known",
      element_bytes));
}

ContentHash operator+(const ContentHash& a, const ContentHash& b) {
  return {a[0] + b[0], a[1] + b[1]};
}

}  // namespace echelon
