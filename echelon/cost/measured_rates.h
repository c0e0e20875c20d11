// Seconds on a device whose rates were measured (`echelon bench --save`).
#pragma once

#include <optional>
#include <string_view>

#include "echelon/cluster/device.h"
#include "echelon/cost/stack.h"
#include "echelon/cost/strategy.h"

namespace echelon {

/// `count` products of one kind. The rate is that of the measured shapes
/// nearby: a plane through the logarithms of rate and m, n, k, to which each
/// shape counts by its distance to the fourth power (Cleveland, 1979: local
/// regression); above what was measured, that of its border. What is smaller
/// takes as long as the smallest measured. Kinds that were not measured are
/// taken for products. None: nothing of this precision was.
std::optional<double> measured_product_seconds(
    const Device& device, ProductKind kind, Precision precision, double m,
    double n, double k, double count = 1);

/// An operator that moves `bytes`: linear in the logarithms between the sizes
/// that were measured of it, or of "add" for one that was not; below them the
/// time stays that of the smallest, above them the rate that of the largest.
/// None: neither was. `bytes_since`, where it is more: what was moved since two
/// of three tensors were used last (an addition to a sum); caches have them no
/// better than parts of one tensor of that size.
std::optional<double> measured_operator_seconds(
    const Device& device, std::string_view name, double bytes,
    double bytes_since = 0);

/// An optimizer's update of `elements` parameters, with gradients and state of
/// `element_bytes` each. None: it was not measured.
std::optional<double> measured_update_seconds(
    const Device& device, std::string_view optimizer, double elements,
    double element_bytes);

/// An operator as the host starts it in training.
struct Launch {
  bool backward = false;    // a gradient runs it
  bool view = false;        // it computes nothing
  double bytes_beside = 0;  // that those around it move, each
};

/// The host's time for it: linear between what was measured. The device has
/// `launch_rates`.
double measured_launch_seconds(const Device& device, const Launch& launch);

/// What a software hides behind computing on other devices takes a processor's
/// own time.
Stack stack_on(const Stack& stack, const Device& device);

}  // namespace echelon
