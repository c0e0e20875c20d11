// How training frameworks work, and how much of a device's performance they
// reach: one set of constants for each framework, none for a model or a row of
// a table. framework.cpp has them, with their sources.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "echelon/cluster/device.h"

namespace echelon::cost {

/// What selective recompute keeps.
enum class SelectiveWay {
  attention_scores,  // Megatron: recomputes the scores alone
  keeps_products,    // echelon: keeps inputs, matmuls and attention
  keeps_half,        // torchtitan: keeps attention and every second matmul
};

/// What a framework keeps in memory, and for how long: what memory_estimate.h
/// reads, together with fused_attention and dropout.
struct FrameworkMemory {
  /// Elements of the feed-forward that a gated one keeps for each of ffn: 3
  /// when one kernel multiplies the two halves, else 4.
  double gated_kept = 3;
  SelectiveWay selective = SelectiveWay::keeps_products;

  /// 16-bit weights stay unsharded, and the 32-bit masters count as the
  /// optimizer's (Megatron, DeepSpeed). Otherwise only the masters stay; their
  /// 16-bit copies are made when used (FSDP), or kept (echelon without stage
  /// 3).
  bool masters_beside = false;
  bool keeps_copies = true;
  double gradient_bytes = 0;  // of an element that stays; 0: as computed
  /// Bytes that masters' gradients take in addition, for each element; they are
  /// sharded like the masters.
  double master_gradient_bytes = 0;
  bool shards_over_cp = false;   // treats cp ranks like those of dp_shard
  bool keeps_embedding = false;  // stage 3: embedding and head stay unsharded
  double prefetch = 1;           // layers unsharded ahead, stage 3
  /// Bytes for each element of the layer whose gradients are being summed.
  double reduce_bytes = 0;

  /// Bytes of a logit, at least one element's: those kept from forward to
  /// backward, and those that the loss needs in addition.
  double logit_kept_bytes = 4;
  double logit_working_bytes = 8;
  double buffer_bytes = 0;    // of collectives, per rank
  double context_bytes = 0;   // of the driver and libraries
  double fragment_share = 0;  // of activations and working memory
};

/// What a training framework fuses, overlaps and keeps.
struct Framework {
  std::string name;  // "megatron-2021", "megatron-core", "fsdp", "echelon"

  // time: what a layer consists of
  bool fused_attention = true;    // the scores are never in memory
  bool native_attention = false;  // kernels made for the device's generation
  double attention_speed = 1;     // relative to FlashAttention 2
  bool fused_elementwise = true;  // bias, dropout, activation, residual in one
  bool dropout = false;
  bool pads_vocabulary = true;  // to a multiple of 128, even without tp
  double compute_share = 1;     // of what libraries reach on the device
  double memory_share = 1;      // the same of operators bound by memory
  double collective_share = 1;  // of the link bandwidth
  double host_seconds = 5e-6;   // launch overhead of one operator on the host
  /// The host launches each operator when the previous one has ended
  /// (CUDA_LAUNCH_BLOCKING).
  bool launches_wait = false;
  /// Steps are CUDA graphs where they can be: the host launches a step, and no
  /// kernel of it.
  bool graphs = false;
  double host_spread = 0.1;  // standard deviation over hosts, of their mean
  double expert_share = 1;   // of a matmul's rate, in groups of experts
  /// Host overhead of one pass through a layer of experts: the host waits to
  /// learn how many tokens each expert gets.
  double expert_host_seconds = 0;
  double layer_host_seconds = 0;  // host overhead of a pass through one layer
  double step_host_seconds = 0;   // host overhead of a step
  // time: gradients and parameters
  bool overlaps_gradients = true;   // with backward
  bool overlaps_parameters = true;  // all-gathers with forward
  /// Stages 1 and 2: all all-gathers begin with the step; otherwise each one
  /// layer ahead.
  bool gathers_at_once = false;
  /// Of an element when ranks sum it; 0: that of the precision. A strategy's
  /// `reduce` comes before it: see reduced_bytes().
  double gradient_bytes = 4;
  /// Moved per parameter and microbatch, in addition to what the matmul writes.
  double accumulate_bytes = 8;
  double quantise_bytes = 4;  // moved per element of an fp8 matmul's input
  double loss_bytes = 20;     // moved per logit in forward, half in backward
  /// The loss has kernels that read each logit of 16 bits once, and once more
  /// in backward, which writes its gradient. They come before loss_bytes.
  bool loss_kernels = false;
  /// Of the gradient of a block's norm: one for its input and one that sums the
  /// parts of the parameters' gradients, or one for both.
  int64_t norm_gradient_kernels = 2;
  double optimizer_bytes = 40;  // moved per parameter and step, AdamW
  /// Gradients of layers with fewer bytes wait for the next layers' and are
  /// summed with them (stage 0); 0: each layer's by themselves.
  double bucket_bytes = 0;
  /// Stages 2 and 3 reduce the gradients of each microbatch, so that none stay
  /// unsharded (gradients_are_reduced_often()).
  bool reduces_each_microbatch = false;
  /// Such a reduction must end before the next backward begins; otherwise
  /// before its own backward ends.
  bool reduces_until_backward = false;
  /// Pipelines that keep parameters unsharded for a step keep the gradients
  /// unsharded too, and reduce them once.
  bool gathers_gradients = false;
  // time: communication within a pass
  /// Collectives of tp run beside matmuls, where these hide them: as a whole,
  /// or in chunks (Strategy::product_chunks). Otherwise shares of them are
  /// hidden:
  bool overlaps_products = false;
  double hidden_tensor_parallel = 0;  // share of tp's collectives overlapped
  double hidden_backward_tensor_parallel = 0;  // the same in backward
  double hidden_context_parallel = 0.8;
  /// A strategy says how keys and values travel (Strategy::context); otherwise
  /// they are all-gathered.
  bool context_ways = false;
  double hidden_expert_parallel = 0;
  /// Slowdown of computation while a collective runs.
  double overlap_slowdown = 0.1;
  bool blocking_transfers = false;  // a stage blocks while it sends
  bool scatters_transfers = false;  // each rank of tp sends its slice
  double transfer_share = 1;  // of the network bandwidth that one pair reaches
  /// The optimizer does not wait for a norm over all stages and rolls back a
  /// wrong update (arXiv:2401.10241, section 4). A rank begins its next step
  /// when its own is done, so a step takes as long as its slowest rank.
  bool validates_afterwards = false;

  FrameworkMemory memory;
};

const std::vector<std::string>& framework_names();
/// Throws ConfigError for an unknown name, with the nearest.
const Framework& find_framework(std::string_view name);

/// The framework on this device: nothing overlaps with computation on a
/// processor.
Framework
framework_on(const Framework& framework, const cluster::Device& device);

}  // namespace echelon::cost
