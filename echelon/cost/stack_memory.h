// What a training software keeps in memory, and how long: the part of a Stack
// (stack.h) that memory_estimate.h reads, beside whether attention is fused and
// whether there is dropout.
#pragma once

namespace echelon {

/// Whose way of selective recompute.
enum class SelectiveWay {
  attention_scores,  // Megatron: scores alone are computed again
  keeps_products,    // echelon: inputs, matrix products and attention stay
  keeps_half,        // torchtitan: attention and every second product stay
};

struct StackMemory {
  /// Elements of the feed-forward that a gated one keeps for each of ffn: 3
  /// when the product of the two halves is one kernel, else 4.
  double gated_kept = 3;
  SelectiveWay selective = SelectiveWay::keeps_products;

  /// 16-bit weights stay whole beside 32-bit masters, which count as the
  /// optimizer's (Megatron, DeepSpeed); else masters alone stay, whose 16-bit
  /// copies are made when used (FSDP), or kept (echelon without stage 3).
  bool masters_beside = false;
  bool keeps_copies = true;
  double gradient_bytes = 0;  // of an element that stays; 0: as computed
  double master_gradient_bytes =
      0;                         // of an element, beside, as cut as the masters
  bool shards_over_cp = false;   // as if cp ranks were of dp_shard
  bool keeps_embedding = false;  // stage 3: embedding and head stay gathered
  double prefetch = 1;           // layers gathered ahead, stage 3
  double reduce_bytes =
      0;  // of an element of the layer whose gradients are summed

  /// Of a logit, kept from forward to backward, and beside that at the loss.
  double logit_kept_bytes = 4;
  double logit_working_bytes = 8;
  double buffer_bytes = 0;    // of collectives, per rank
  double context_bytes = 0;   // the driver's, and libraries'
  double fragment_share = 0;  // of activations and working memory
};

}  // namespace echelon
