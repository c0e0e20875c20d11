#include "echelon/report/series.h"

#include <algorithm>
#include <cmath>

namespace echelon {
namespace {

// Sums and ranges of what is drawn stay finite.
constexpr double kLargest = 1e150;

double round_step(double range, int count) {
  const double rough = range / std::max(1, count);
  const double power = std::pow(10, std::floor(std::log10(rough)));
  for (double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough * 0.999) return factor * power;
  }
  return 10 * power;
}

std::vector<double> ticks_every(double low, double high, double step) {
  std::vector<double> ticks;
  const double first = std::ceil(low / step - 1e-9);
  const double last = std::floor(high / step + 1e-9);
  for (double i = first; i <= last && ticks.size() < 100; ++i) {
    ticks.push_back(i * step);
  }
  return ticks;
}

// The value at each point of the line fitted to up to `reach` points on either
// side: their mean where there are as many on both, and near the ends a line
// that goes on as they do.
std::vector<Point> smoothed(const std::vector<Point>& points, size_t reach) {
  const size_t count = points.size();
  std::vector<double> sums(count + 1, 0.0);     // of y, of all points before
  std::vector<double> moments(count + 1, 0.0);  // of index * y
  for (size_t i = 0; i < count; ++i) {
    sums[i + 1] = sums[i] + points[i].y;
    moments[i + 1] = moments[i] + static_cast<double>(i) * points[i].y;
  }
  std::vector<Point> result = points;
  for (size_t i = 0; i < count; ++i) {
    const size_t begin = i - std::min(i, reach);
    const size_t end = std::min(i + reach + 1, count);
    const auto n = static_cast<double>(end - begin);
    const double middle = static_cast<double>(begin + end - 1) / 2;
    const double mean = (sums[end] - sums[begin]) / n;
    const double spread = n * (n * n - 1) / 12;  // of n whole numbers
    const double slope =
        spread > 0
            ? (moments[end] - moments[begin] - n * middle * mean) / spread
            : 0;
    result[i].y = mean + slope * (static_cast<double>(i) - middle);
  }
  return result;
}

}  // namespace

std::vector<Bucket>
to_buckets(const std::vector<Point>& points, size_t max_buckets) {
  std::vector<Point> finite;
  std::copy_if(
      points.begin(), points.end(), std::back_inserter(finite),
      [](const Point& p) {
        return std::isfinite(p.x) && std::abs(p.y) < kLargest;
      });
  const size_t count = finite.size();
  const size_t num = std::min(count, max_buckets);
  // Twice half the width leaves no corners.
  const size_t reach = std::max<size_t>(count < 20 ? 1 : 2, count / 60);
  const auto smooth = smoothed(smoothed(finite, reach), reach);
  std::vector<Bucket> buckets;
  for (size_t b = 0; b < num; ++b) {
    const size_t begin = b * count / num;
    const size_t end = (b + 1) * count / num;
    Bucket bucket{
        .first_x = finite[begin].x,
        .last_x = finite[end - 1].x,
        .low = finite[begin].y,
        .high = finite[begin].y};
    for (size_t i = begin; i < end; ++i) {
      const double y = finite[i].y;
      bucket.low = std::min(bucket.low, y);
      bucket.high = std::max(bucket.high, y);
      bucket.mean += y / static_cast<double>(end - begin);
      bucket.smooth += smooth[i].y / static_cast<double>(end - begin);
    }
    buckets.push_back(bucket);
  }
  return buckets;
}

std::vector<double> linear_ticks(double low, double high, int count) {
  if (!(high > low)) return {low};
  return ticks_every(low, high, round_step(high - low, count));
}

std::vector<double> whole_ticks(double low, double high, int count) {
  if (!(high > low)) return {low};
  const double step = std::max(1.0, round_step(high - low, count));
  return ticks_every(low, high, step);
}

std::vector<double> log_ticks(double low, double high) {
  const double decades = std::log10(high / low);
  std::vector<double> ticks;
  for (double power = std::floor(std::log10(low));
       power <= std::ceil(std::log10(high)) && ticks.size() < 1000; ++power) {
    for (double factor : {1.0, 2.0, 5.0}) {
      const double tick = factor * std::pow(10, power);
      const bool shown = factor == 1 || decades < 2.2;
      if (shown && tick >= low * 0.999 && tick <= high * 1.001) {
        ticks.push_back(tick);
      }
    }
  }
  return ticks;
}

int tick_decimals(const std::vector<double>& ticks) {
  if (ticks.size() < 2) return 2;
  double step = ticks[1] - ticks[0];
  for (size_t i = 1; i < ticks.size(); ++i) {
    step = std::min(step, ticks[i] - ticks[i - 1]);
  }
  if (!(step > 0)) return 2;
  return std::clamp(
      static_cast<int>(std::ceil(-std::log10(step) - 1e-9)), 0, 9);
}

}  // namespace echelon
