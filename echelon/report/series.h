// Curves of any length made small enough to draw.
#pragma once

#include <cstddef>
#include <vector>

namespace echelon {

struct Point {
  double x = 0;
  double y = 0;
};

/// A stretch of a curve: where it is, the least and the greatest value in it,
/// its mean, and the mean of the smoothed curve over it.
struct Bucket {
  double first_x = 0;
  double last_x = 0;
  double low = 0;
  double high = 0;
  double mean = 0;
  double smooth = 0;
};

/// At most `max_buckets` stretches of equally many points; points that are not
/// finite, or beyond 1e150, are left out. The smoothed curve is the mean over
/// about 1/15 of the points around each, a fitted line near the ends; it does
/// not lag behind.
std::vector<Bucket>
to_buckets(const std::vector<Point>& points, size_t max_buckets);

/// Values at equal and round distances (1, 2, 5 times a power of ten) inside
/// [low, high], about `count` of them.
std::vector<double> linear_ticks(double low, double high, int count);
/// Powers of ten inside [low, high]; their 2- and 5-fold too when few.
std::vector<double> log_ticks(double low, double high);
/// As linear_ticks, whole numbers only.
std::vector<double> whole_ticks(double low, double high, int count);

/// Decimals that tell neighbouring ticks apart.
int tick_decimals(const std::vector<double>& ticks);

}  // namespace echelon
