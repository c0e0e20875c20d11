#include "echelon/cost/measured_rates.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace echelon {
namespace {

using Shape = std::array<double, 3>;  // logarithms of m, n, k

Shape shape_of(const MatrixRate& rate) {
  return {std::log(static_cast<double>(rate.m)), std::log(static_cast<double>(rate.n)),
          std::log(static_cast<double>(rate.k))};
}

/// A weighted mean of what was measured near `at`.
class NearbyRates {
 public:
  explicit NearbyRates(const Shape& at) : at_(at) {}

  /// Outside of the box of all shapes, its border is asked.
  void clamp(const Device& device, ProductKind kind, Precision precision) {
    Shape low, high;
    low.fill(std::numeric_limits<double>::infinity());
    high.fill(-std::numeric_limits<double>::infinity());
    for (const MatrixRate& rate : device.matrix_rates) {
      if (rate.kind != kind || rate.precision != precision) continue;
      const Shape shape = shape_of(rate);
      for (size_t i = 0; i < shape.size(); ++i) {
        low[i] = std::min(low[i], shape[i]);
        high[i] = std::max(high[i], shape[i]);
      }
    }
    for (size_t i = 0; i < at_.size(); ++i) {
      if (low[i] <= high[i]) at_[i] = std::clamp(at_[i], low[i], high[i]);
    }
  }

  void add(const MatrixRate& rate) {
    const Shape shape = shape_of(rate);
    double distance = 0;  // squared
    for (size_t i = 0; i < shape.size(); ++i) {
      distance += (shape[i] - at_[i]) * (shape[i] - at_[i]);
    }
    constexpr double kSame = 1e-9;
    const double weight = 1 / std::max(kSame, distance * distance);
    weights_ += weight;
    sum_ += weight * std::log(rate.flops_per_second);
  }

  bool any() const { return weights_ > 0; }
  double rate() const { return std::exp(sum_ / weights_); }

 private:
  Shape at_;
  double weights_ = 0;
  double sum_ = 0;
};

/// Rates of one operator by size, of equal name; empty: it was not measured.
std::vector<const OperatorRate*> rates_of_operator(
    const Device& device, std::string_view name) {
  std::vector<const OperatorRate*> rates;
  for (const OperatorRate& rate : device.operator_rates) {
    if (rate.name == name) rates.push_back(&rate);
  }
  std::sort(rates.begin(), rates.end(), [](const auto* a, const auto* b) {
    return a->bytes < b->bytes;
  });
  return rates;
}

}  // namespace

std::optional<double> measured_product_seconds(
    const Device& device, ProductKind kind, Precision precision, double m, double n,
    double k, double count) {
  const double flops = count * product_flops(kind, m, n, k);
  if (flops <= 0) return 0.0;
  for (const ProductKind asked : {kind, ProductKind::product}) {
    NearbyRates nearby({std::log(m), std::log(n), std::log(k)});
    nearby.clamp(device, asked, precision);
    for (const MatrixRate& rate : device.matrix_rates) {
      if (rate.kind == asked && rate.precision == precision) nearby.add(rate);
    }
    if (nearby.any()) return flops / nearby.rate();
  }
  return std::nullopt;
}

std::optional<double> measured_operator_seconds(
    const Device& device, std::string_view name, double bytes) {
  if (device.operator_rates.empty()) return std::nullopt;
  if (bytes <= 0) return 0.0;
  auto rates = rates_of_operator(device, name);
  if (rates.empty()) rates = rates_of_operator(device, "add");
  if (rates.empty()) return std::nullopt;
  const auto above =
      std::find_if(rates.begin(), rates.end(), [&](const OperatorRate* rate) {
        return rate->bytes >= bytes;
      });
  if (above == rates.begin()) return bytes / rates.front()->bytes_per_second;
  if (above == rates.end()) return bytes / rates.back()->bytes_per_second;
  const OperatorRate& low = **(above - 1);
  const OperatorRate& high = **above;
  const double part = std::log(bytes / low.bytes) / std::log(high.bytes / low.bytes);
  const double ratio = high.bytes_per_second / low.bytes_per_second;
  return bytes / (low.bytes_per_second * std::pow(ratio, part));
}

std::optional<double> measured_update_seconds(
    const Device& device, std::string_view optimizer, double elements,
    double element_bytes) {
  // SGD reads parameters and gradients and writes parameters; Adam two moments as
  // well.
  const bool sgd = optimizer == "sgd";
  const std::string name = sgd ? "optimizer sgd" : "optimizer adamw";
  if (rates_of_operator(device, name).empty()) return std::nullopt;
  return measured_operator_seconds(
      device, name, (sgd ? 3 : 7) * elements * element_bytes);
}

Stack stack_on(const Stack& stack, const Device& device) {
  Stack here = stack;
  if (!device.processor) return here;
  here.overlaps_gradients = false;
  here.overlaps_parameters = false;
  here.hidden_tensor_parallel = 0;
  here.hidden_backward_tensor_parallel = 0;
  here.hidden_context_parallel = 0;
  here.hidden_expert_parallel = 0;
  return here;
}

}  // namespace echelon
