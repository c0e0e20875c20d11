// What a model is, as far as its cost goes: no weights, no code.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace echelon {

/// Experts of a mixture: Shazeer et al., 2017, arXiv:1701.06538.
struct ExpertShape {
  int64_t experts = 0;            // 0: the feed-forward is dense
  int64_t experts_per_token = 0;  // k
  int64_t ffn = 0;                // of one expert
  int64_t shared_ffn = 0;         // of experts that every token passes
  int64_t first_dense_layers = 0; // whose feed-forward is dense
  int64_t every = 1;              // one layer in this many has experts
};

/// DeepSeek's latent attention: arXiv:2405.04434, section 2.1.
struct LatentAttention {
  int64_t query_rank = 0;  // 0: queries are not compressed
  int64_t key_value_rank = 0;
  int64_t rope_dim = 0;
  int64_t nope_dim = 0;
  int64_t value_dim = 0;
};

struct TransformerShape {
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;   // 0: as many as heads
  int64_t head_dim = 0;   // 0: hidden / heads
  int64_t ffn = 0;        // 0: 4 * hidden
  int64_t vocab = 0;
  bool gated = false;     // three matrices in the feed-forward (SwiGLU)
  bool tied = true;       // the head uses the embedding
  int64_t positions = 0;  // learned; 0: none (rotary, ALiBi)
  bool biases = true;
  bool rms_norm = false;
  bool causal = true;
  ExpertShape experts;
  std::optional<LatentAttention> latent;
};

/// One layer of any other network, as counted by the training wing (LayerCost) or
/// from its formula, for one sample in elements and FLOPs.
struct CountedLayer {
  std::string name;
  double forward_flops = 0;
  double backward_flops = 0;
  double parameters = 0;
  double kept_elements = 0;       // from forward to backward
  double moved_elements = 0;      // read and written by memory-bound operators
  double output_elements = 0;
  /// Of its largest matrix product, for the rate: rows come from the samples.
  int64_t inner = 0, columns = 0;
  double rows = 0;
};

struct ModelShape {
  std::string name;
  std::optional<TransformerShape> transformer;  // else:
  std::vector<CountedLayer> layers;
  int64_t seq_len = 0;  // usual; 0 for images

  double num_parameters() const;
  double active_parameters() const;  // of one token
  /// Of forward and backward of one sample, without recompute; attention in full
  /// (as if not causal) or as the mask needs it.
  double model_flops(int64_t seq_len, bool full_attention) const;
};

/// Throws ConfigError for degrees that no layer allows: heads % kv_heads, …
void check(const ModelShape& model);

}  // namespace echelon
