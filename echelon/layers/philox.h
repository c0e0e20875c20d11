// Counter-based random numbers: the words of Philox4x32-10 at any position of a
// stream, the same that at::Philox4_32(key, subsequence, counter) gives in
// turn. Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
// 2011.
//
// They are computed in blocks of 16 counters, in plain loops without branches,
// which compilers turn into vector instructions. A caller that is compiled for
// AVX2 gets AVX2 instructions.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace echelon {

inline constexpr int kPhiloxCounters = 16;
/// Words of a block.
inline constexpr int kPhiloxBlock = 4 * kPhiloxCounters;

/// The four output words of each of the counters first … first + 15: element
/// 4 i + j of a stream is word j of counter i.
struct PhiloxWords {
  using Words = std::array<uint32_t, kPhiloxCounters>;
  Words a, b, c, d;
};

[[gnu::always_inline]] inline void
philox(uint64_t key, uint64_t subsequence, uint64_t first, PhiloxWords& out) {
  constexpr int n = kPhiloxCounters;
  uint32_t a[n], b[n], c[n], d[n];
  for (int i = 0; i < n; ++i) {
    const uint64_t counter = first + static_cast<uint64_t>(i);
    a[i] = static_cast<uint32_t>(counter);
    b[i] = static_cast<uint32_t>(counter >> 32);
    c[i] = static_cast<uint32_t>(subsequence);
    d[i] = static_cast<uint32_t>(subsequence >> 32);
  }
  uint32_t key_low = static_cast<uint32_t>(key);
  uint32_t key_high = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 1  // g++ 12 does not vectorise the unrolled loop
    for (int i = 0; i < n; ++i) {
      const uint64_t p = uint64_t{0xD2511F53} * a[i];
      const uint64_t q = uint64_t{0xCD9E8D57} * c[i];
      a[i] = static_cast<uint32_t>(q >> 32) ^ b[i] ^ key_low;
      c[i] = static_cast<uint32_t>(p >> 32) ^ d[i] ^ key_high;
      b[i] = static_cast<uint32_t>(q);
      d[i] = static_cast<uint32_t>(p);
    }
    key_low += 0x9E3779B9;
    key_high += 0xBB67AE85;
  }
  std::copy(a, a + n, out.a.begin());
  std::copy(b, b + n, out.b.begin());
  std::copy(c, c + n, out.c.begin());
  std::copy(d, d + n, out.d.begin());
}

}  // namespace echelon
