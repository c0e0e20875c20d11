// A transformer by the numbers that its cost depends on, of any family. The
// models that are trained here have more (language_model.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

namespace echelon {

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
  bool post_norms = false;   // one more norm after attention and feed-forward
  int64_t window = 0;        // tokens that attention reaches back; 0: all
  int64_t global_every = 0;  // the last of this many layers has no window; 0:
                             // all have it
  ExpertShape experts;
  std::optional<LatentAttention> latent;

  /// The heads of keys and values, with the default filled in for 0.
  int64_t key_value_heads() const { return kv_heads > 0 ? kv_heads : heads; }
  /// The head size of queries and keys.
  int64_t head_size() const {
    if (latent) return latent->nope_dim + latent->rope_dim;
    return head_dim > 0 ? head_dim : hidden / heads;
  }
  int64_t value_head_size() const {
    return latent ? latent->value_dim : head_size();
  }
  int64_t ffn_size() const { return ffn > 0 ? ffn : 4 * hidden; }
  /// The layers whose attention has the window.
  int64_t window_layers() const {
    if (window == 0) return 0;
    return global_every > 0 ? layers - layers / global_every : layers;
  }
  bool has_experts(int64_t layer) const {
    return experts.experts > 0 && layer >= experts.first_dense_layers &&
           (layer + 1) % experts.every == 0;
  }
  int64_t expert_layers() const {  // how many
    if (experts.experts == 0) return 0;
    const int64_t dense = std::min(experts.first_dense_layers, layers);
    return layers / experts.every - dense / experts.every;
  }
  bool operator==(const TransformerShape&) const = default;
};

}  // namespace echelon
