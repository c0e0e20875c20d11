// Attention whose heads are sharded over a tensor-parallel group: each rank
// computes its query heads, and the key/value heads that they use.
//
//   ParallelAttention attention(
//       {.shape = {.hidden = 768, .heads = 12}}, parallel, "attn");
//   y = attention.forward(x, {.batch = 8, .sequence = 1024});
//
// With fewer key/value heads than ranks, or when the queries of one such head
// are on two ranks, several ranks hold the same key/value head: shards overlap,
// and their gradients are terms of a sum (ParameterShard::sum_gradients).
//
// Latent attention compresses tokens to a few features, from which each head
// computes its queries, keys and values. The compressing matrices are on every
// rank; with sharded tokens each rank compresses its own, and the compressed
// tokens are gathered.
//
// Sources: Vaswani et al., "Attention Is All You Need", 2017, arXiv:1706.03762;
// grouped queries: Ainslie et al., "GQA", 2023, arXiv:2305.13245; sharding by
// heads: Shoeybi et al., "Megatron-LM", 2019, arXiv:1909.08053, section 3;
// latent attention: DeepSeek-AI, "DeepSeek-V2", 2024, arXiv:2405.04434, section
// 2.1.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "echelon/layers/sharded_module.h"
#include "echelon/layout/shard.h"
#include "echelon/parallel/tensor/linear.h"
#include "echelon/parallel/tensor/norm.h"
#include "echelon/parallel/tensor/rotary.h"
#include "echelon/parallel/tensor/tensor_parallel.h"

namespace echelon {

struct AttentionShape {
  int64_t hidden = 1;     // features of a token
  int64_t heads = 1;      // of queries
  int64_t kv_heads = 0;   // of keys and values, which divide `heads`; 0: heads
  int64_t head_size = 0;  // features of a head; 0: hidden / heads

  int64_t num_kv_heads() const { return kv_heads > 0 ? kv_heads : heads; }
  int64_t size_of_head() const {
    return head_size > 0 ? head_size : hidden / heads;
  }
  /// Query heads per key/value head.
  int64_t group() const { return heads / num_kv_heads(); }
};

/// Throws ConfigError, with the numbers and those that would fit, when `heads`
/// does not divide `hidden` (unless head_size is given), when `kv_heads` does
/// not divide `heads`, or when there are more than `heads` tensor-parallel
/// ranks.
void check_attention(const AttentionShape& shape, int64_t tp);

/// The heads of rank `rank` of `tp`.
struct AttentionHeads {
  IndexRange query;     // an even share
  IndexRange kv;        // that these queries use; other ranks may have them too
  IndexRange kv_owned;  // those of `kv` that no earlier rank has
  /// Whether several ranks hold some key/value head; the same on every rank.
  bool shares_kv = false;
  /// Whether each head of `kv` serves the same number of heads of `query`.
  bool uniform = true;
};

/// Expects check_attention to have passed.
AttentionHeads heads_of(const AttentionShape& shape, int64_t rank, int64_t tp);

/// Latent attention. A head of queries and keys has nope_size features without
/// positions and rope_size that are rotated, which all heads of keys share.
struct LatentShape {
  int64_t query_rank = 0;  // features of a compressed query; 0: not compressed
  int64_t key_value_rank = 1;
  int64_t nope_size = 1;
  int64_t rope_size = 2;
  int64_t value_size = 1;
  double norm_eps = 1e-6;  // of the norms of compressed tokens
};

struct AttentionOptions {
  AttentionShape shape;
  /// True: as GPT-2 of Hugging Face, one matrix c_attn [hidden, queries + keys
  /// + values] and c_proj [queries, hidden], both WeightLayout::in_out. False:
  /// as llama, q_proj, k_proj, v_proj and o_proj, WeightLayout::out_in.
  bool fused = true;
  bool bias = true;       // of all matrices; llama has none
  bool qkv_bias = false;  // not fused, without `bias`: of queries,
                          // keys and values, as qwen2 has
  /// Above 0: RMSNorm of each head of queries and keys with this eps, before
  /// the rotation, as qwen3 has.
  double qk_norm_eps = 0;
  /// Tokens that a query attends to, itself and those before it; 0: all.
  int64_t window = 0;
  std::optional<RotaryOptions> rotary;  // of queries and keys
  double scale = 0;                     // of scores; 0: 1 / sqrt(head_size)
  double softcap = 0;  // scores s become cap tanh(s / cap), as in gemma2; 0:
                       // they stay
  /// Norms of queries and keys multiply by 1 + weight, as gemma3's do.
  bool qk_norm_adds_one = false;
  /// As DeepSeek has it: not fused, without biases, with `rotary`, as many
  /// kv_heads as heads, and head_size = nope_size + rope_size.
  std::optional<LatentShape> latent;
  double dropout = 0;  // of probabilities, in training
};

/// Keys and values of earlier positions, of this rank's heads. It starts empty,
/// and forward appends to it. Use one per attention layer.
struct KeyValueCache {
  torch::Tensor keys;    // [batch, room, kv_heads_r, head_size]
  torch::Tensor values;  // the same; latent: features of a head of values
  int64_t length = 0;    // positions filled, at most `room`
};

/// The shape of a batch of tokens, and which tokens attend to which.
struct AttentionFrame {
  int64_t batch = 0;
  int64_t sequence = 0;  // tokens of each sample here
  /// In a context-parallel group: the tokens of whole sequences, of which
  /// `sequence` are here.
  int64_t total = 0;
  /// In such a group, in place of `mask`: int64 [batch, total], the tokens of
  /// one document of a sample have the same number; undefined: no borders.
  torch::Tensor documents;
  /// From document_mask, one for all layers; undefined: every position attends
  /// to itself and to earlier ones.
  torch::Tensor mask;
  /// int64 [batch]: keys for dropout (dropout.h), read in training.
  torch::Tensor keys;
  /// For generation, without gradients: positions begin at cache->length and
  /// attend to the cached positions too. `mask` must be undefined.
  KeyValueCache* cache = nullptr;
};

/// A mask to add to the attention scores, so that each token attends only to
/// its own document, up to itself: 0 where it may attend, minus infinity
/// elsewhere.
///
///   documents  int64 [batch, sequence]: the tokens of one document of a sample
///              have the same number
///   returns    [batch, 1, sequence, sequence] of `dtype`, that of the queries
torch::Tensor
document_mask(const torch::Tensor& documents, torch::ScalarType dtype);

class CompressingLinear;  // attention.cpp

/// Causal self-attention by scaled_dot_product_attention. With dropout and with
/// a softcap it uses the plain formula, which stores matrices [batch, heads_r,
/// sequence, sequence]: the fused kernels' dropout depends on the layout, and
/// they have no softcap. Parameters
/// have Hugging Face's names and layouts:
///
///   c_attn.weight [hidden, (heads_r + 2 kv_heads_r) * head_size], c_attn.bias,
///   c_proj.weight [heads_r * head_size, hidden], c_proj.bias [hidden]
/// or
///   q_proj.weight [heads_r * head_size, hidden],
///   k_proj.weight and v_proj.weight [kv_heads_r * head_size, hidden],
///   o_proj.weight [hidden, heads_r * head_size]
///   with qk_norm_eps: q_norm.weight and k_norm.weight [head_size]
/// or, latent,
///   q_proj.weight [heads_r * head_size, hidden], or with query_rank:
///     q_a_proj.weight [query_rank, hidden], q_a_layernorm.weight,
///     q_b_proj.weight [heads_r * head_size, query_rank]
///   kv_a_proj_with_mqa.weight [key_value_rank + rope_size, hidden],
///   kv_a_layernorm.weight, kv_b_proj.weight
///     [heads_r * (nope_size + value_size), key_value_rank],
///   o_proj.weight [hidden, heads_r * value_size]
class ParallelAttention : public torch::nn::Module {
 public:
  /// `label`: the layer's name, "transformer.h.0.attn". It labels collectives,
  /// and dropout draws from the stream label + ".attn_dropout". Throws
  /// ConfigError as check_attention does.
  ParallelAttention(
      const AttentionOptions& options, TensorParallel parallel,
      std::string label);

  /// x [batch, sequence, hidden], or with sharded tokens [tokens_r, hidden] ->
  /// the same shape. Every rank of the group calls this. Throws ConfigError
  /// when the shape of x does not match `frame`.
  torch::Tensor forward(const torch::Tensor& x, const AttentionFrame& frame);

  const AttentionHeads& heads() const { return heads_; }

 private:
  struct QueryKeyValue {
    torch::Tensor query, key, value;
  };

  std::shared_ptr<ColumnParallelLinear>
  add_projection(const std::string& name, bool query, bool key, bool value);
  std::shared_ptr<ColumnParallelLinear>
  add_heads(const std::string& name, int64_t in, int64_t size);
  void add_latent();
  QueryKeyValue project(const torch::Tensor& x, const AttentionFrame& frame);
  QueryKeyValue
  project_latent(const torch::Tensor& x, const AttentionFrame& frame);
  RotaryTable rotations(
      const AttentionFrame& frame, const torch::TensorOptions& like) const;
  torch::Tensor attend(const QueryKeyValue& qkv, const AttentionFrame& frame);
  torch::Tensor
  attend_in_context(QueryKeyValue qkv, const AttentionFrame& frame);
  torch::Tensor by_plain_formula(
      const QueryKeyValue& qkv, const torch::Tensor& mask,
      const torch::Tensor& keys) const;
  torch::Tensor for_queries(const torch::Tensor& kv, bool grouped) const;

  AttentionOptions options_;
  TensorParallel parallel_;
  std::string label_;
  AttentionHeads heads_;
  std::vector<std::shared_ptr<ColumnParallelLinear>> in_;
  std::shared_ptr<RowParallelLinear> out_;
  std::shared_ptr<RMSNorm> query_norm_, key_norm_;  // null: none; latent: of
                                                    // compressed tokens
  /// Latent: query_up_ alone, without query_down_, where there is no
  /// query_rank.
  std::shared_ptr<CompressingLinear> query_down_, key_value_down_;
  std::shared_ptr<ColumnParallelLinear> query_up_, key_value_up_;
  std::vector<int64_t> queries_of_kv_;
};

}  // namespace echelon
