// Attention whose heads are cut over a tensor-parallel group: each rank
// computes its heads of queries and the heads of keys and values that they use.
//
// With fewer heads of keys and values than ranks, or a cut through the queries
// of one, the same head lies on several ranks: shards overlap, and their
// gradients are parts of a sum (ParameterShard::sum_gradients).
//
// Sources: Vaswani et al., "Attention Is All You Need", 2017, arXiv:1706.03762;
// grouped queries: Ainslie et al., "GQA", 2023, arXiv:2305.13245; cut by heads:
// Shoeybi et al., "Megatron-LM", 2019, arXiv:1909.08053, section 3.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "echelon/layers/sharded_module.h"
#include "echelon/parallel/tensor/attention_shape.h"
#include "echelon/parallel/tensor/linear.h"
#include "echelon/parallel/tensor/rotary.h"
#include "echelon/parallel/tensor/tensor_parallel.h"

namespace echelon {

struct AttentionOptions {
  AttentionShape shape;
  /// As GPT-2 of Hugging Face: one matrix c_attn [hidden, queries + keys +
  /// values] and c_proj [queries, hidden], both WeightLayout::in_out. Else as
  /// llama: q_proj, k_proj, v_proj, o_proj, WeightLayout::out_in.
  bool fused = true;
  bool bias = true;                     // of all of them; llama has none
  std::optional<RotaryOptions> rotary;  // of queries and keys
  double dropout = 0;                   // of probabilities, in training
};

/// Keys and values of positions that were computed before, of this rank's
/// heads. Starts empty; forward appends to it. One per attention layer.
struct KeyValueCache {
  torch::Tensor keys;    // [batch, room, kv_heads_r, head_size]
  torch::Tensor values;  // the same
  int64_t length = 0;    // positions that are there, at most `room`
};

/// How the tokens of a forward pass lie, and who attends to whom.
struct AttentionFrame {
  int64_t batch = 0;
  int64_t sequence = 0;
  /// Of document_mask, one for all layers; undefined: every position attends to
  /// itself and those before it.
  torch::Tensor mask;
  /// int64 [batch]: what dropout draws from (dropout.h), read in training.
  torch::Tensor keys;
  /// For generation, without gradients: positions begin at cache->length, and
  /// attend to what is there as well. `mask` is undefined then.
  KeyValueCache* cache = nullptr;
};

/// What is added to the scores so that tokens attend to their own document's
/// tokens, up to themselves: 0 where they may, minus infinity where not.
///
///   documents  int64 [batch, sequence]: a number that tokens of one document
///   of
///              a sample share
///   returns    [batch, 1, sequence, sequence] of `dtype`, that of the queries
torch::Tensor
document_mask(const torch::Tensor& documents, torch::ScalarType dtype);

/// Causal self-attention, by scaled_dot_product_attention; with dropout, which
/// that cannot make independently of the layout, by the plain formula, which
/// keeps matrices [batch, heads_r, sequence, sequence]. Parameters have Hugging
/// Face's names and layouts:
///
///   c_attn.weight [hidden, (heads_r + 2 kv_heads_r) * head_size], c_attn.bias,
///   c_proj.weight [heads_r * head_size, hidden], c_proj.bias [hidden]
/// or
///   q_proj.weight [heads_r * head_size, hidden], k_proj.weight and
///   v_proj.weight [kv_heads_r * head_size, hidden], o_proj.weight [hidden,
///   heads_r * head_size]
class ParallelAttention : public torch::nn::Module {
 public:
  /// `label`: the layer's name, "transformer.h.0.attn"; it names collectives,
  /// and dropout draws from the stream of label + ".attn_dropout".
  /// Throws ConfigError as check_attention does.
  ParallelAttention(
      const AttentionOptions& options, TensorParallel parallel,
      std::string label);

  /// x [batch, sequence, hidden], or with cut tokens [tokens_r, hidden] ->
  /// the same shape. Throws ConfigError when x is not as `frame` says.
  torch::Tensor forward(const torch::Tensor& x, const AttentionFrame& frame);

  const AttentionHeads& heads() const { return heads_; }

 private:
  class Projection;
  struct Parts {
    torch::Tensor query, key, value;
  };

  std::shared_ptr<Projection>
  add_projection(const std::string& name, bool query, bool key, bool value);
  Parts project(const torch::Tensor& x, const AttentionFrame& frame);
  torch::Tensor attend(const Parts& parts, const AttentionFrame& frame);
  torch::Tensor with_dropout(
      const Parts& parts, torch::Tensor mask, const torch::Tensor& keys) const;
  torch::Tensor for_queries(const torch::Tensor& kv, bool fused) const;

  AttentionOptions options_;
  TensorParallel parallel_;
  std::string label_;
  AttentionHeads heads_;
  std::vector<std::shared_ptr<Projection>> in_;
  std::shared_ptr<RowParallelLinear> out_;
  std::vector<int64_t> queries_of_kv_;
};

}  // namespace echelon
