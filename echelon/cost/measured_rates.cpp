// Rates between measured points are interpolated in logarithms. A matmul has
// three sides: a plane is fitted to the logarithms of all measured rates, where
// near points count most. It never exceeds the rates that were measured, and
// beyond the measured sides it stays as at the border. Other operators depend
// on their bytes alone, so two neighbours are enough.
#include "echelon/cost/device_rates.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace echelon::cost {
namespace {

using Shape = std::array<double, 3>;  // logarithms of m, n, k

Shape shape_of(const cluster::MatrixRate& rate) {
  return {
      std::log(static_cast<double>(rate.m)),
      std::log(static_cast<double>(rate.n)),
      std::log(static_cast<double>(rate.k))};
}

/// A plane through the logarithms of the rates near `at`, each weighed by its
/// distance to the fourth power.
class NearbyRates {
 public:
  explicit NearbyRates(const Shape& at) : at_(at) {
    low_.fill(std::numeric_limits<double>::infinity());
    high_.fill(-std::numeric_limits<double>::infinity());
  }

  void add(const cluster::MatrixRate& rate) {
    const Shape shape = shape_of(rate);
    for (size_t i = 0; i < shape.size(); ++i) {
      low_[i] = std::min(low_[i], shape[i]);
      high_[i] = std::max(high_[i], shape[i]);
    }
    points_.push_back({shape, std::log(rate.flops_per_second)});
  }

  bool any() const { return !points_.empty(); }

  /// The factor, at most 1, by which a shape is below the smallest sides that
  /// were measured. A kernel's time does not shrink with it.
  double below() const {
    double below = 1;
    for (size_t i = 0; i < at_.size(); ++i) {
      below *= std::exp(std::max(0.0, low_[i] - at_[i]));
    }
    return below;
  }

  /// Outside of the box of all shapes, that of its border.
  double rate() {
    for (size_t i = 0; i < at_.size(); ++i) {
      at_[i] = std::clamp(at_[i], low_[i], high_[i]);
    }
    double least = points_.front().rate, most = least;
    for (const Point& point : points_) {
      fit_.add(distances(point), weight(point), point.rate);
      least = std::min(least, point.rate);
      most = std::max(most, point.rate);
    }
    return std::exp(std::clamp(fit_.at_origin(), least, most));
  }

 private:
  struct Point {
    Shape shape;
    double rate = 0;  // logarithm
  };

  /// Weighted least squares; slopes are held near 0 where few points tell them.
  class Plane {
   public:
    void add(const Shape& x, double weight, double y) {
      const std::array<double, 4> row = {1, x[0], x[1], x[2]};
      for (size_t i = 0; i < 4; ++i) {
        for (size_t k = 0; k < 4; ++k) sums_[i][k] += weight * row[i] * row[k];
        sums_[i][4] += weight * row[i] * y;
      }
    }

    double at_origin() {
      for (size_t i = 1; i < 4; ++i) sums_[i][i] += kHeld * sums_[0][0];
      for (size_t i = 3; i > 0; --i) {  // eliminates slopes
        for (size_t row = 0; row < i; ++row) {
          const double factor = sums_[row][i] / sums_[i][i];
          for (size_t k = 0; k < 5; ++k) sums_[row][k] -= factor * sums_[i][k];
        }
      }
      return sums_[0][4] / sums_[0][0];
    }

   private:
    static constexpr double kHeld = 0.01;
    std::array<std::array<double, 5>, 4> sums_{};
  };

  Shape distances(const Point& point) const {
    Shape x;
    for (size_t i = 0; i < x.size(); ++i) x[i] = point.shape[i] - at_[i];
    return x;
  }

  double weight(const Point& point) const {
    double distance = 0;  // squared
    for (const double x : distances(point)) distance += x * x;
    constexpr double kSame = 1e-9;
    return 1 / std::max(kSame, distance * distance);
  }

  Shape at_, low_, high_;
  std::vector<Point> points_;
  Plane fit_;
};

/// Rates of one operator by size, of equal name; empty: it was not measured.
std::vector<const cluster::OperatorRate*>
rates_of_operator(const cluster::Device& device, std::string_view name) {
  std::vector<const cluster::OperatorRate*> rates;
  for (const cluster::OperatorRate& rate : device.operator_rates) {
    if (rate.name == name) rates.push_back(&rate);
  }
  std::sort(rates.begin(), rates.end(), [](const auto* a, const auto* b) {
    return a->bytes < b->bytes;
  });
  return rates;
}

}  // namespace

std::optional<double> measured_product_seconds(
    const cluster::Device& device, cluster::ProductKind kind,
    cluster::Precision precision, double m, double n, double k, double count) {
  const double flops = count * cluster::product_flops(kind, m, n, k);
  if (flops <= 0) return 0.0;
  for (const cluster::ProductKind asked :
       {kind, cluster::ProductKind::product}) {
    NearbyRates nearby({std::log(m), std::log(n), std::log(k)});
    for (const cluster::MatrixRate& rate : device.matrix_rates) {
      if (rate.kind == asked && rate.precision == precision) nearby.add(rate);
    }
    if (!nearby.any()) continue;
    const double computed = flops * nearby.below();
    return computed / nearby.rate();
  }
  return std::nullopt;
}

std::optional<double> measured_operator_seconds(
    const cluster::Device& device, std::string_view name, double bytes,
    double bytes_since) {
  if (bytes > 0 && bytes_since > bytes) {
    const auto near = measured_operator_seconds(device, name, bytes);
    const auto all = measured_operator_seconds(device, name, bytes_since);
    if (!near || !all) return std::nullopt;
    const double far = *all * bytes / bytes_since;
    return *near / 3 + 2 * std::max(*near, far) / 3;
  }
  if (device.operator_rates.empty()) return std::nullopt;
  if (bytes <= 0) return 0.0;
  auto rates = rates_of_operator(device, name);
  if (rates.empty()) rates = rates_of_operator(device, "add");
  if (rates.empty()) return std::nullopt;
  const auto above = std::find_if(
      rates.begin(), rates.end(),
      [&](const cluster::OperatorRate* rate) { return rate->bytes >= bytes; });
  if (above == rates.begin()) {
    return rates.front()->bytes / rates.front()->bytes_per_second;
  }
  if (above == rates.end()) return bytes / rates.back()->bytes_per_second;
  const cluster::OperatorRate& low = **(above - 1);
  const cluster::OperatorRate& high = **above;
  const double part =
      std::log(bytes / low.bytes) / std::log(high.bytes / low.bytes);
  const double ratio = high.bytes_per_second / low.bytes_per_second;
  return bytes / (low.bytes_per_second * std::pow(ratio, part));
}

std::optional<double> measured_update_seconds(
    const cluster::Device& device, OptimizerKind optimizer, double elements,
    double element_bytes) {
  // SGD reads parameters and gradients and writes parameters; Adam two moments
  // as well.
  const bool sgd = optimizer == OptimizerKind::sgd;
  const std::string name = sgd ? "optimizer sgd" : "optimizer adamw";
  if (rates_of_operator(device, name).empty()) return std::nullopt;
  return measured_operator_seconds(
      device, name, (sgd ? 3 : 7) * elements * element_bytes);
}

double
measured_launch_seconds(const cluster::Device& device, const Launch& launch) {
  const double bytes_beside = launch.bytes_beside;
  const cluster::LaunchRate* below = nullptr;  // the nearest on either side
  const cluster::LaunchRate* above = nullptr;
  for (const cluster::LaunchRate& rate : device.launch_rates) {
    if (rate.bytes_beside <= bytes_beside) {
      if (!below || rate.bytes_beside > below->bytes_beside) below = &rate;
    } else if (!above || rate.bytes_beside < above->bytes_beside) {
      above = &rate;
    }
  }
  const auto seconds = [&](const cluster::LaunchRate& rate) {
    if (launch.view) {
      return launch.backward ? rate.backward_view_seconds : rate.view_seconds;
    }
    return launch.backward ? rate.backward_seconds : rate.seconds;
  };
  if (!above) return seconds(*below);
  if (!below) return seconds(*above);
  const double part = (bytes_beside - below->bytes_beside) /
                      (above->bytes_beside - below->bytes_beside);
  return seconds(*below) + part * (seconds(*above) - seconds(*below));
}

}  // namespace echelon::cost
