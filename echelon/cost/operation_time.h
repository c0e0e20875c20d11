// Seconds of one operation on one device, and of one pass through a layer.
// Sources: Williams et al., 2009 (roofline); the CUDA C++ best practices for
// matmuls (tiles and waves). Constants: device_rates.cpp.
#pragma once

#include <array>
#include <vector>

#include "echelon/cost/collective_time.h"

namespace echelon::cost {

/// `count` matmuls of [m, k] and [k, n] that run together. With `one_weight`
/// all have the same [k, n], which counts as read once, as the rows of one
/// matmul read it.
double matrix_seconds(
    int64_t m, int64_t n, int64_t k, cluster::Precision precision,
    const cluster::Device& device, const DeviceRates& rates, int64_t count = 1,
    bool one_weight = false);
double memory_seconds(
    double bytes, const cluster::Device& device, const DeviceRates& rates);

/// The part of a collective that computation of the same pass hides.
double hidden_seconds(
    const Operation& operation, const Strategy& strategy,
    const cluster::Cluster& cluster, int64_t rank = 0);

/// Any operation on `rank` in an average pass, all of it, hidden or not.
double operation_seconds(
    const Operation& operation, const Strategy& strategy,
    const cluster::Cluster& cluster, int64_t rank = 0);

/// One pass through one layer: its operations one after the other on the
/// device, while the host launches them.
struct PassSeconds {
  double matrix = 0;                      // matmuls and attention
  double memory = 0;                      // bound by memory
  double host = 0;                        // the device waits for launches
  std::array<double, 6> exposed{};        // by axis (kAxes)
  std::array<double, 6> communication{};  // by axis, hidden or not

  double computation() const { return matrix + memory + host; }
  double total() const;
  void add(double factor, const PassSeconds& other);
};

/// Whether devices, GPUs all of them, repeat captured steps, so that no host
/// launches their kernels: the framework does that, nothing of a step is in the
/// host's memory, and no host asks how many tokens an expert gets.
bool steps_are_graphs(
    const Strategy& strategy, const cluster::Cluster& cluster,
    const Framework& framework);

/// Seconds that a host takes to launch the kernels of a pass, without those
/// that framework and layer add.
double launch_seconds(
    const Operations& operations, const cluster::Device& device,
    const Framework& framework);

PassSeconds pass_seconds(
    const Operations& operations, const Strategy& strategy,
    const cluster::Cluster& cluster, const Framework& framework,
    int64_t rank = 0);

}  // namespace echelon::cost
