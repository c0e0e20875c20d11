#include "echelon/timeline/intervals.h"

#include <algorithm>
#include <utility>

namespace echelon::timeline {

Intervals merged(std::vector<Interval> intervals) {
  std::ranges::sort(intervals, {}, &Interval::begin);
  Intervals result;
  for (const auto& interval : intervals) {
    if (interval.begin >= interval.end) continue;
    if (!result.empty() && interval.begin <= result.back().end) {
      result.back().end = std::max(result.back().end, interval.end);
    } else {
      result.push_back(interval);
    }
  }
  return result;
}

Intervals intersection(const Intervals& a, const Intervals& b) {
  Intervals result;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    const int64_t begin = std::max(a[i].begin, b[j].begin);
    const int64_t end = std::min(a[i].end, b[j].end);
    if (begin < end) result.push_back({begin, end});
    (a[i].end < b[j].end) ? ++i : ++j;
  }
  return result;
}

Intervals difference(const Intervals& a, const Intervals& b) {
  Intervals result;
  size_t j = 0;
  for (Interval rest : a) {
    while (j < b.size() && b[j].end <= rest.begin) ++j;
    for (size_t k = j; k < b.size() && b[k].begin < rest.end; ++k) {
      if (rest.begin < b[k].begin) result.push_back({rest.begin, b[k].begin});
      rest.begin = std::max(rest.begin, b[k].end);
    }
    if (rest.begin < rest.end) result.push_back(rest);
  }
  return result;
}

int64_t total_length(const Intervals& intervals) {
  int64_t length = 0;
  for (const auto& interval : intervals) {
    length += interval.end - interval.begin;
  }
  return length;
}

double total_seconds(const Intervals& times) {
  return 1e-9 * static_cast<double>(total_length(times));
}

double take_seconds(Intervals& rest, std::vector<Interval> times) {
  const Intervals taken = intersection(rest, merged(std::move(times)));
  rest = difference(rest, taken);
  return total_seconds(taken);
}

}  // namespace echelon::timeline
