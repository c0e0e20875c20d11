// Hashes of a checkpoint's files and of its tensors. They are not
// cryptographic. Free of LibTorch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "echelon/checkpoint/format/box.h"

struct XXH3_state_s;

namespace echelon {

/// XXH3-128 as 32 hexadecimal digits.
std::string checksum(const void* bytes, size_t size);

/// A checksum of the size and, where there are more than 256 MiB, of 64 blocks
/// of 4 MiB that are spread evenly: quick for any size, but a change between
/// two blocks is not seen.
std::string sampled_checksum(const void* bytes, size_t size);

/// checksum() of bytes that arrive piece by piece.
class ChecksumStream {
 public:
  ChecksumStream();

  void update(const void* bytes, size_t size);
  /// The checksum of all bytes since the last call.
  std::string digest();

 private:
  struct Free {
    void operator()(XXH3_state_s* state) const;
  };
  std::unique_ptr<XXH3_state_s, Free> state_;
};

/// A hash of a tensor's contents that does not depend on how it is sharded:
/// sums over its elements of numbers that depend on an element's index and
/// bits. Ranks hash what they have and add up.
///
/// Element number i, row-major, of the whole tensor adds the pair z, (key | 1)
/// z, all modulo 2^64:
///
///   key = (i + 1) * 0x9e3779b97f4a7c15
///   z   = key ^ bits             its 1, 2, 4 or 8 bytes, little-endian
///   z   = (z ^ z >> 32) * 0xd6e8feb86659fd93       twice
///   z   = z ^ z >> 32
///
/// Each step can be undone, so a change of one element always changes both
/// sums. The mixer is a xorshift-multiply of the family of Stafford's "Better
/// Bit Mixing", 2011.
using ContentHash = std::array<uint64_t, 2>;

/// The hash of the elements of `box` in a tensor of `shape`, given their
/// row-major bytes: 1, 2, 4 or 8 an element; other widths throw Error.
ContentHash hash_elements(
    const std::vector<int64_t>& shape, const Box& box, const std::byte* bytes,
    size_t element_bytes);

ContentHash operator+(const ContentHash& a, const ContentHash& b);

}  // namespace echelon
