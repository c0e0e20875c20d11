// Variants of one computation, timed in turn.
//
// In each round all variants run once; a ratio is a variant's time over the
// first one's in the same round.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace echelon {

struct Variant {
  std::string name;
  std::function<void()> step;
};

struct VariantTimes {
  std::string name;
  std::vector<double> seconds;  // by round
  std::vector<double> ratios;
};

inline double quantile(std::vector<double> values, double of) {
  std::ranges::sort(values);
  return values[static_cast<size_t>(
      of * static_cast<double>(values.size() - 1))];
}

/// Three rounds more run first and are not counted.
///
///   meet  brings ranks together before and after each step
inline std::vector<VariantTimes> time_in_turn(
    const std::vector<Variant>& variants, int rounds,
    const std::function<void()>& meet) {
  using Clock = std::chrono::steady_clock;
  std::vector<VariantTimes> times;
  for (const auto& variant : variants) times.push_back({.name = variant.name});
  for (int round = -3; round < rounds; ++round) {
    for (size_t i = 0; i < variants.size(); ++i) {
      meet();
      const auto start = Clock::now();
      variants[i].step();
      meet();
      const double seconds =
          std::chrono::duration<double>(Clock::now() - start).count();
      if (round < 0) continue;
      times[i].seconds.push_back(seconds);
      times[i].ratios.push_back(seconds / times[0].seconds.back());
    }
  }
  return times;
}

}  // namespace echelon
