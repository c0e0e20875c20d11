// A model as far as its cost depends on it: no weights, no code.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace echelon {

/// Formulas compute with numbers that may be fractions.
inline double as_double(int64_t value) {
  return static_cast<double>(value);
}

/// Experts of a mixture: Shazeer et al., 2017, arXiv:1701.06538.
struct ExpertShape {
  int64_t experts = 0;             // 0: the feed-forward is dense
  int64_t experts_per_token = 0;   // k
  int64_t ffn = 0;                 // of one expert
  int64_t shared_ffn = 0;          // of all experts that every token passes
  int64_t first_dense_layers = 0;  // first layers without experts
  int64_t every = 1;               // the last of this many layers has experts
  bool operator==(const ExpertShape&) const = default;
};

/// DeepSeek's latent attention: arXiv:2405.04434, section 2.1.
struct LatentAttention {
  int64_t query_rank = 0;  // 0: queries are not compressed
  int64_t key_value_rank = 0;
  int64_t rope_dim = 0;
  int64_t nope_dim = 0;
  int64_t value_dim = 0;
  bool operator==(const LatentAttention&) const = default;
};

struct TransformerShape {
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;  // 0: as many as heads
  int64_t head_dim = 0;  // 0: hidden / heads
  int64_t ffn = 0;       // 0: 4 * hidden
  int64_t vocab = 0;
  bool gated = false;     // three matrices in the feed-forward (SwiGLU)
  bool tied = true;       // the head uses the embedding
  int64_t positions = 0;  // learned; 0: none (rotary, ALiBi)
  bool biases = true;
  bool qkv_biases = false;  // without `biases`: of queries, keys, values alone
  bool rms_norm = false;
  bool qk_norm = false;         // queries and keys are normalised, head by head
  bool embedding_norm = false;  // one more norm after the embedding
  bool causal = true;
  int64_t window = 0;        // tokens that attention reaches back; 0: all
  int64_t window_every = 1;  // one layer in this many has the window
  ExpertShape experts;
  std::optional<LatentAttention> latent;

  // With the defaults of 0 filled in.
  int64_t key_value_heads() const { return kv_heads > 0 ? kv_heads : heads; }
  int64_t head_size() const;  // of queries and keys
  int64_t value_head_size() const;
  int64_t ffn_size() const { return ffn > 0 ? ffn : 4 * hidden; }
  bool has_experts(int64_t layer) const;
  int64_t expert_layers() const;  // how many
  bool operator==(const TransformerShape&) const = default;
};

/// Elements of one transformer block by what shards them: tensor parallelism
/// shards matrices, expert parallelism `experts`, nothing `norms` and `router`.
struct BlockParameters {
  double attention = 0;     // matrices and biases
  double feed_forward = 0;  // dense, or of shared experts
  double experts = 0;       // all routed ones
  double router = 0;
  double norms = 0;

  double total() const {
    return attention + feed_forward + experts + router + norms;
  }
};
BlockParameters block_parameters(const TransformerShape& shape, bool experts);
/// Tokens and learned positions, and the norm after them.
double embedding_parameters(const TransformerShape& shape);
/// The last norm, and the head unless it is tied.
double head_parameters(const TransformerShape& shape);

/// Pairs of tokens that attention computes for one sample in one layer.
double attention_pairs(
    const TransformerShape& shape, int64_t seq_len, bool window, bool full);

/// One operator of a layer, as it ran.
struct CountedOperator {
  std::string name;  // "gelu", the operator's own name
  /// The kind of matmul (cluster/device.h), of `count` times [m, k] and [k, n];
  /// empty: the operator moves `bytes`, or is a view.
  std::string product;
  int64_t count = 0, m = 0, n = 0, k = 0;
  double bytes = 0;
  bool for_weight = false;  // a gradient of weights: split backward delays it
  /// Adds a gradient to that of earlier microbatches: independent of their
  /// size, and not in the first one.
  bool accumulates = false;
  bool operator==(const CountedOperator&) const = default;
};

/// One layer of any other network, as counted by the training wing (LayerCost)
/// or from its formula, for one sample in elements and FLOPs.
struct CountedLayer {
  std::string name;
  double forward_flops = 0;
  double backward_flops = 0;
  double parameters = 0;
  double kept_elements = 0;  // from forward to backward
  /// Read and written by memory-bound operators of forward; backward moves
  /// about twice as much.
  double moved_elements = 0;
  double output_elements = 0;
  /// Of its largest matmul, for the rate; rows come from the samples.
  int64_t inner = 0, columns = 0;
  double rows = 0;
  /// The operators of a microbatch of `counted_samples`; without them one large
  /// matmul and one pass through memory stand for the layer.
  int64_t counted_samples = 0;
  std::vector<CountedOperator> forward, backward;
  int64_t stage = -1;  // of the pipeline it was counted for; -1: not said

  bool operator==(const CountedLayer&) const = default;
};

struct ModelShape {
  std::string name;
  std::optional<TransformerShape> transformer;  // otherwise:
  std::vector<CountedLayer> layers;
  int64_t seq_len = 0;  // usual; 0 for images

  double num_parameters() const;
  /// Parameters that one token uses: k of the experts, and everything else.
  double active_parameters() const;
  /// FLOPs of forward and backward of one sample, without recompute; attention
  /// in full (as without a mask) or as the mask needs it. `seq_len` 0: the
  /// usual one.
  double model_flops(int64_t seq_len, bool full_attention) const;
};

/// Throws ConfigError for numbers that make no model: heads % kv_heads, …
void check(const ModelShape& model);

}  // namespace echelon
