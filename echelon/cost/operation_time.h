// Seconds of one operation on one device, and of one pass through a layer.
// Source: Williams et al., 2009 (roofline); tiles and waves: the CUDA C++ best
// practices of matrix products. Constants: device_rates.cpp.
#pragma once

#include <array>
#include <vector>

#include "echelon/cost/collective_time.h"

namespace echelon {

/// `count` products of [m, k] and [k, n] that run together.
double matrix_seconds(
    int64_t m, int64_t n, int64_t k, Precision precision, const Device& device,
    const DeviceRates& rates, int64_t count = 1);
double
memory_seconds(double bytes, const Device& device, const DeviceRates& rates);

/// Of any operation on `rank`, all of it, hidden or not; in an average pass.
double operation_seconds(
    const Operation& operation, const Strategy& strategy,
    const Cluster& cluster, int64_t rank = 0);

/// One pass through one layer: its operations one after the other on the
/// device, and the host that must launch them all.
struct PassSeconds {
  double matrix = 0;                      // matrix products and attention
  double memory = 0;                      // bound by memory
  double host = 0;                        // the device waits for launches
  std::array<double, 6> exposed{};        // by axis (kAxes)
  std::array<double, 6> communication{};  // by axis, hidden or not

  double computation() const { return matrix + memory + host; }
  double total() const;
  PassSeconds& operator+=(const PassSeconds& other);
  void add(double factor, const PassSeconds& other);
};
PassSeconds operator*(double factor, PassSeconds pass);

PassSeconds pass_seconds(
    const Operations& operations, const Strategy& strategy,
    const Cluster& cluster, const Stack& stack, int64_t rank = 0);

}  // namespace echelon
