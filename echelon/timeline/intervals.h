// Sets of times as sorted half-open intervals that do not touch.
#pragma once

#include <cstdint>
#include <vector>

namespace echelon::timeline {

struct Interval {
  int64_t begin = 0;
  int64_t end = 0;  // exclusive

  bool operator==(const Interval&) const = default;
};

/// Sorted by begin; each is nonempty and ends before the next begins.
using Intervals = std::vector<Interval>;

/// The union of any intervals, in any order; empty ones vanish.
Intervals merged(std::vector<Interval> intervals);

Intervals intersection(const Intervals& a, const Intervals& b);
Intervals difference(const Intervals& a, const Intervals& b);
int64_t total_length(const Intervals& intervals);

/// The total length of times in nanoseconds.
double total_seconds(const Intervals& times);

/// Removes `times` from `rest`; returns the seconds that this took from it.
double take_seconds(Intervals& rest, std::vector<Interval> times);

}  // namespace echelon::timeline
