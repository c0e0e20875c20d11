// The rates that devices reach. They are either measured, or shares of the
// published peaks. The shares are one set of constants for each kind of device;
// no model and no published measurement has constants of its own.
// device_rates.cpp has them, with their sources.
#pragma once

#include <optional>
#include <string_view>

#include "echelon/cluster/device.h"
#include "echelon/options/optimizer.h"

namespace echelon::cost {

/// What a device reaches with any framework.
struct DeviceRates {
  // computation
  double matrix_share = 0.80;      // of the peak, large even matmuls
  double matrix_share_fp8 = 0.70;  // the same of fp8 and fp4
  double attention_share = 0.55;   // of the peak, FlashAttention 2 forwards
  double attention_backward_share = 0.45;
  /// The share with kernels made for this generation (cuDNN); 0: they are no
  /// faster.
  double native_attention_share = 0;
  double native_attention_backward_share = 0;
  double memory_share = 0.80;  // of the memory bandwidth, for streams
  double cache_bytes = 40e6;   // second level
  double cache_speedup = 2.5;  // of its bandwidth over the memory's
  double roofline_norm = 1.2;  // 1: computation and memory one after the other;
                               // large: side by side
  double launch_seconds = 2e-6;  // launch overhead on the device itself
  int multiprocessors = 0;  // each runs one tile of a matmul; 0: any number
  int tile = 128;           // shorter side of the largest tile, twice as long

  // collectives inside a node
  double ring_share = 0.80;  // of the link bandwidth, rings of many ranks
  double ring_ramp = 0.43;  // rings of n reach ring_share * n / (n + ring_ramp)
  double switch_share = 0.80;    // when the switch reduces (bus bandwidth)
  double start_seconds = 12e-6;  // of any collective, without link latency
  double hop_seconds = 2e-6;     // of one step of a ring
  /// Time to fill the pipeline of chunks: for large messages; half of it at
  /// `fill_bytes`.
  double fill_seconds = 100e-6;
  double fill_bytes = 8e6;

  // An optimizer's share of the host memory bandwidth: arXiv:2101.06840, table
  // 4, moves 28 bytes of each of 1e9 parameters in 0.22 s, of 1e10 in 2.6 s,
  // where the channels give 256 GB/s.
  double host_memory_share = 0.45;

  // between nodes
  double network_share = 0.85;  // of the adapters' bandwidth
  double network_fill_seconds = 200e-6;
};

/// The rates of a device of the catalogue, or of one that a cluster file
/// declares `like` it; of a measured device (Device::measured) exactly what its
/// file says; of any other what devices reach on average, whatever its name
/// begins with.
const DeviceRates& rates_of(const cluster::Device& device);

// Where `echelon bench --save` measured the device
// -----------------------------------------------------------------------------

/// Seconds of `count` matmuls of one kind. The rate comes from nearby measured
/// shapes: a plane fitted to the logarithms of rate and m, n, k, with each
/// shape weighted by the inverse fourth power of its distance (Cleveland, 1979:
/// local regression). Beyond the largest shapes the rate stays that of the
/// border; smaller shapes take as long as the smallest measured one. Kinds that
/// were not measured count as matmuls. Empty when nothing of this precision was
/// measured.
std::optional<double> measured_product_seconds(
    const cluster::Device& device, cluster::ProductKind kind,
    cluster::Precision precision, double m, double n, double k,
    double count = 1);

/// Seconds of an operator that moves `bytes`: log-log interpolation between its
/// measured sizes, or those of "add" if it was not measured. Below them the
/// time stays that of the smallest, above them the rate that of the largest.
/// Empty when neither was measured. `bytes_since`, if larger: what was moved
/// since two of three tensors were used last (accumulation); caches hold these
/// no better than parts of one tensor of that size.
std::optional<double> measured_operator_seconds(
    const cluster::Device& device, std::string_view name, double bytes,
    double bytes_since = 0);

/// Seconds of an optimizer's update of `elements` parameters, with gradients
/// and state of `element_bytes` each. Empty when it was not measured.
std::optional<double> measured_update_seconds(
    const cluster::Device& device, OptimizerKind optimizer, double elements,
    double element_bytes);

/// An operator as the host launches it in training.
struct Launch {
  bool backward = false;    // in backward
  bool view = false;        // it computes nothing
  double bytes_beside = 0;  // moved by each of its neighbours
};

/// Its launch overhead on a device with `launch_rates`, interpolated linearly.
double
measured_launch_seconds(const cluster::Device& device, const Launch& launch);

}  // namespace echelon::cost
