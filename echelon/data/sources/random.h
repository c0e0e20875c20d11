// Random numbers as a function of a key: the same on every platform, for any
// number of ranks and threads, in any order of use.
// Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
// 2014 (splitmix64); Lemire, "Fast random integer generation in an interval",
// 2019, arXiv:1805.10941 (below).
#pragma once

#include <cstdint>
#include <initializer_list>

namespace echelon {

/// The purpose of a stream of random numbers. It is part of the key, so that
/// two uses of one seed get different numbers.
enum class RandomUse : uint64_t {
  split = 1,        // the held-out samples
  order = 2,        // the order of an epoch
  augment = 3,      // crop and flip of a sample
  dummy = 4,        // random samples
  sample_key = 5,   // Batch::more's keys
  blend = 6,        // the order of one source of several, in one pass
  sample_text = 7,  // tokens that a model generates
};

/// A permutation of 64-bit words that looks random (splitmix64's finaliser).
constexpr uint64_t mix_bits(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// The numbers of one key: splitmix64, with the key mixed into its state.
class RandomStream {
 public:
  RandomStream(RandomUse use, std::initializer_list<uint64_t> key)
      : state_(mix_bits(static_cast<uint64_t>(use) * kStep)) {
    for (const uint64_t word : key) state_ = mix_bits(state_ + kStep + word);
  }

  uint64_t bits() { return mix_bits(state_ += kStep); }

  /// Uniform over [0, bound), without bias; bound > 0.
  uint64_t below(uint64_t bound) {
    __extension__ using uint128 = unsigned __int128;
    uint128 product = static_cast<uint128>(bits()) * bound;
    if (static_cast<uint64_t>(product) < bound) {
      const uint64_t threshold = -bound % bound;
      while (static_cast<uint64_t>(product) < threshold) {
        product = static_cast<uint128>(bits()) * bound;
      }
    }
    return static_cast<uint64_t>(product >> 64);
  }

  /// Uniform over [0, 1), a multiple of 2^-53.
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

 private:
  static constexpr uint64_t kStep = 0x9e3779b97f4a7c15u;
  uint64_t state_;
};

}  // namespace echelon
