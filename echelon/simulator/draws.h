// Counter-based random numbers: each depends only on what it is for, not on the
// order of events.
//
// Source: the finaliser of SplitMix64; Steele et al., 2014.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace echelon::simulator {

/// Hashes two words to one.
inline uint64_t mixed(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9E3779B97F4A7C15u + (b ^ 0xD1B54A32D192ED03u);
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

/// In (0, 1].
inline double uniform(uint64_t word) {
  return (static_cast<double>(word >> 11) + 1.0) * 0x1p-53;
}

/// Mean 0, deviation 1 (Box and Muller, 1958).
inline double normal(uint64_t word) {
  const double radius = std::sqrt(-2 * std::log(uniform(mixed(word, 1))));
  return radius * std::cos(2 * std::numbers::pi * uniform(mixed(word, 2)));
}

}  // namespace echelon::simulator
