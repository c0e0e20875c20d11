// What devices and software reach of the published peaks: one set of constants for
// each device and each software stack, none for a model or a row of a table. All of
// them are in calibration.cpp, each with where it comes from.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "echelon/cluster/device.h"
#include "echelon/cost/stack_memory.h"

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
  double memory_share = 0.80;      // of the memory's rate, for streams
  double cache_bytes = 40e6;       // second level
  double cache_speedup = 2.5;        // of its rate over the memory's
  double roofline_norm = 1.2;  // 1: computation and memory one after the other; large:
                             // side by side
  double launch_seconds = 2e-6;    // that the device itself takes to begin
  int multiprocessors = 0;  // tiles of a product run on these at once; 0: any number
  int tile = 128;           // side of a square tile

  // collectives inside a node
  double ring_share = 0.80;      // of a link's rate, rings of many ranks
  double ring_ramp = 0.43;       // rings of n reach ring_share * n / (n + ring_ramp)
  double switch_share = 0.80;    // when the switch reduces (bus bandwidth)
  double start_seconds = 12e-6;  // of any collective, beside the link's latency
  double hop_seconds = 2e-6;     // of one step of a ring
  /// A pipeline of chunks fills: this more for large messages, half of it at
  /// `fill_bytes`.
  double fill_seconds = 100e-6;
  double fill_bytes = 8e6;

  // between nodes
  double network_share = 0.85;        // of the adapters' rate
  double network_fill_seconds = 200e-6;
};

/// Of a device of the catalogue by name; of one that was measured (Device::measured)
/// all that its file says; of others what devices reach on average.
const DeviceRates& rates_of(const Device& device);

/// How a training software works: what it fuses, hides and keeps.
struct Stack {
  std::string name;  // "megatron-2021", "megatron-core", "fsdp", "echelon"

  // time: what a layer consists of
  bool fused_attention = true;    // scores never in memory
  bool native_attention = false;  // by kernels made for the device's generation
  double attention_speed = 1;     // of FlashAttention 2's
  bool fused_elementwise = true;  // bias, dropout, activation, residual in one
  bool dropout = false;
  bool pads_vocabulary = true;    // to a multiple of 128, even when it is not cut
  double compute_share = 1;       // of what the device reaches, by its libraries
  double memory_share = 1;        // the same of operators bound by memory
  double collective_share = 1;    // of the rate of links
  double host_seconds = 5e-6;     // of the host, to launch one operator
  double expert_share = 1;        // of a product's rate, in groups of experts
  /// Beside, of one pass through a layer of experts: the host waits to learn how many
  /// tokens each gets.
  double expert_host_seconds = 0;
  double layer_host_seconds = 0;  // beside, of one pass through one layer
  double step_host_seconds = 0;   // beside, of one step
  // time: gradients and parameters
  bool overlaps_gradients = true;   // with backward
  bool overlaps_parameters = true;  // gathers with forward
  double gradient_bytes = 4;        // of an element when ranks sum it
  double accumulate_bytes = 8;      // moved per parameter and microbatch, beside
                                    // what the product writes
  double quantise_bytes = 4;      // moved per element of an input of an fp8 product
  double loss_bytes = 20;         // moved per logit forwards, half of it backwards
  double optimizer_bytes = 40;      // moved per parameter and step, AdamW
  double bucket_bytes = 0;          // of gradients, one collective each; 0: one in all
  bool reduces_each_microbatch = false;  // stage 2 and 3, as FSDP does
  // time: communication within a pass
  double hidden_tensor_parallel = 0;   // part of tp's collectives that is hidden
  double hidden_backward_tensor_parallel = 0;  // the same, backwards
  double hidden_context_parallel = 0.8;
  double hidden_expert_parallel = 0;
  double overlap_slowdown = 0.1;  // of computation while a collective runs beside it
  bool blocking_transfers = false;  // a stage waits for what it sends
  bool scatters_transfers = false;  // each rank of tp sends its slice
  double transfer_share = 1;  // of the network's rate that one pair reaches

  StackMemory memory;
};

const std::vector<std::string>& stack_names();
/// Throws ConfigError for an unknown name, with the nearest.
const Stack& find_stack(std::string_view name);

}  // namespace echelon
