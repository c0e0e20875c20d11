// What devices reach of their published peaks: one set of constants for each
// kind of device, whoever asks, none for a model or a row of a table.
// device_rates.cpp has each with where it comes from.
#pragma once

#include "echelon/cluster/device.h"

namespace echelon {

/// What a device reaches, whoever asks.
struct DeviceRates {
  // computation
  double matrix_share = 0.80;      // of the peak, large even products
  double matrix_share_fp8 = 0.70;  // the same of fp8 and fp4
  double attention_share = 0.55;   // of the peak, FlashAttention 2 forwards
  double attention_backward_share = 0.45;
  /// Of kernels made for this generation (cuDNN); 0: those are no better.
  double native_attention_share = 0;
  double native_attention_backward_share = 0;
  double memory_share = 0.80;  // of the memory's rate, for streams
  double cache_bytes = 40e6;   // second level
  double cache_speedup = 2.5;  // of its rate over the memory's
  double roofline_norm = 1.2;  // 1: computation and memory one after the other;
                               // large: side by side
  double launch_seconds = 2e-6;  // that the device itself takes to begin
  int multiprocessors =
      0;           // tiles of a product run on these at once; 0: any number
  int tile = 128;  // shorter side of the largest tile, twice as long

  // collectives inside a node
  double ring_share = 0.80;  // of a link's rate, rings of many ranks
  double ring_ramp = 0.43;  // rings of n reach ring_share * n / (n + ring_ramp)
  double switch_share = 0.80;    // when the switch reduces (bus bandwidth)
  double start_seconds = 12e-6;  // of any collective, beside the link's latency
  double hop_seconds = 2e-6;     // of one step of a ring
  /// A pipeline of chunks fills: this more for large messages, half of it at
  /// `fill_bytes`.
  double fill_seconds = 100e-6;
  double fill_bytes = 8e6;

  // of the host's memory, an optimizer there: arXiv:2101.06840, table 4, moves
  // 28 bytes of each of 1e9 parameters in 0.22 s, of 1e10 in 2.6 s, where
  // channels give 256 GB/s
  double host_memory_share = 0.45;

  // between nodes
  double network_share = 0.85;  // of the adapters' rate
  double network_fill_seconds = 200e-6;
};

/// Of a device of the catalogue, and of one that a cluster file declares to be
/// `like` it; of one that was measured (Device::measured) all that its file
/// says; of every other what devices reach on average, whatever its name begins
/// with.
const DeviceRates& rates_of(const Device& device);

}  // namespace echelon
