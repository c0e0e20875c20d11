// Seconds on a device whose rates were measured (`echelon bench --save`).
#pragma once

#include <optional>
#include <string_view>

#include "echelon/cluster/device.h"
#include "echelon/cost/framework.h"
#include "echelon/cost/strategy.h"

namespace echelon {

/// Seconds of `count` matmuls of one kind. The rate comes from nearby measured
/// shapes: a plane fitted to the logarithms of rate and m, n, k, with each
/// shape weighted by the inverse fourth power of its distance (Cleveland, 1979:
/// local regression). Beyond the largest shapes the rate stays that of the
/// border; smaller shapes take as long as the smallest measured one. Kinds that
/// were not measured count as matmuls. Empty when nothing of this precision was
/// measured.
std::optional<double> measured_product_seconds(
    const Device& device, ProductKind kind, Precision precision, double m,
    double n, double k, double count = 1);

/// Seconds of an operator that moves `bytes`: log-log interpolation between its
/// measured sizes, or those of "add" if it was not measured. Below them the
/// time stays that of the smallest, above them the rate that of the largest.
/// Empty when neither was measured. `bytes_since`, if larger: what was moved
/// since two of three tensors were used last (accumulation); caches hold these
/// no better than parts of one tensor of that size.
std::optional<double> measured_operator_seconds(
    const Device& device, std::string_view name, double bytes,
    double bytes_since = 0);

/// Seconds of an optimizer's update of `elements` parameters, with gradients
/// and state of `element_bytes` each. Empty when it was not measured.
std::optional<double> measured_update_seconds(
    const Device& device, std::string_view optimizer, double elements,
    double element_bytes);

/// An operator as the host launches it in training.
struct Launch {
  bool backward = false;    // in backward
  bool view = false;        // it computes nothing
  double bytes_beside = 0;  // moved by each of its neighbours
};

/// Its launch overhead on a device with `launch_rates`, interpolated linearly.
double measured_launch_seconds(const Device& device, const Launch& launch);

/// The framework on this device: nothing overlaps with computation on a
/// processor.
Framework framework_on(const Framework& framework, const Device& device);

}  // namespace echelon
