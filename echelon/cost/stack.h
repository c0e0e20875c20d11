// How training software works, and what it reaches of what devices do: one set
// of constants for each, none for a model or a row of a table.
// megatron_stacks.cpp and sharded_stacks.cpp have them, each with where it
// comes from.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "echelon/cost/stack_memory.h"

namespace echelon {

/// How a training software works: what it fuses, hides and keeps.
struct Stack {
  std::string name;  // "megatron-2021", "megatron-core", "fsdp", "echelon"

  // time: what a layer consists of
  bool fused_attention = true;    // scores never in memory
  bool native_attention = false;  // by kernels made for the device's generation
  double attention_speed = 1;     // of FlashAttention 2's
  bool fused_elementwise = true;  // bias, dropout, activation, residual in one
  bool dropout = false;
  bool pads_vocabulary = true;  // to a multiple of 128, even when it is not cut
  double compute_share = 1;     // of what the device reaches, by its libraries
  double memory_share = 1;      // the same of operators bound by memory
  double collective_share = 1;  // of the rate of links
  double host_seconds = 5e-6;   // of the host, to launch one operator
  /// Each operator is launched when the one before it has ended
  /// (CUDA_LAUNCH_BLOCKING).
  bool launches_wait = false;
  double host_spread = 0.1;  // standard deviation of hosts, of their mean
  double expert_share = 1;   // of a product's rate, in groups of experts
  /// Beside, of one pass through a layer of experts: the host waits to learn
  /// how many tokens each gets.
  double expert_host_seconds = 0;
  double layer_host_seconds = 0;  // beside, of one pass through one layer
  double step_host_seconds = 0;   // beside, of one step
  /// What a rank computes of a microbatch, beside which a processor's host work
  /// was measured (StageTimes::computing_seconds); none: its host work is left
  /// out.
  std::optional<double> computing_seconds;
  // time: gradients and parameters
  bool overlaps_gradients = true;   // with backward
  bool overlaps_parameters = true;  // gathers with forward
  /// Of stages 1 and 2: all begin with the step; else each one layer ahead.
  bool gathers_at_once = false;
  double gradient_bytes = 4;    // of an element when ranks sum it
  double accumulate_bytes = 8;  // moved per parameter and microbatch, beside
                                // what the product writes
  double quantise_bytes = 4;  // moved per element of an input of an fp8 product
  double loss_bytes = 20;     // moved per logit forwards, half of it backwards
  double optimizer_bytes = 40;  // moved per parameter and step, AdamW
  /// Gradients of layers with fewer bytes wait for the next layers' and are
  /// summed with them (stage 0); 0: each layer's by themselves.
  double bucket_bytes = 0;
  bool reduces_each_microbatch = false;  // stage 2 and 3, as FSDP does
  // time: communication within a pass
  double hidden_tensor_parallel = 0;  // part of tp's collectives that is hidden
  double hidden_backward_tensor_parallel = 0;  // the same, backwards
  double hidden_context_parallel = 0.8;
  double hidden_expert_parallel = 0;
  double overlap_slowdown =
      0.1;  // of computation while a collective runs beside it
  bool blocking_transfers = false;  // a stage waits for what it sends
  bool scatters_transfers = false;  // each rank of tp sends its slice
  double transfer_share = 1;  // of the network's rate that one pair reaches
  /// The optimizer does not wait for a norm over all stages, it takes back what
  /// was wrong (arXiv:2401.10241, section 4): a rank begins its next step when
  /// its own is done, so a step takes as long as the rank that is longest at
  /// it.
  bool validates_afterwards = false;

  StackMemory memory;
};

const std::vector<std::string>& stack_names();
/// Throws ConfigError for an unknown name, with the nearest.
const Stack& find_stack(std::string_view name);

}  // namespace echelon
