// A model as far as its cost depends on it: no weights, no code. Files of
// layers that the training wing counted let any network be simulated:
//
//   echelon-train count first.toml --json > layers.json
//   echelon simulate first.toml --cluster h100-sxm:1x8 --layers layers.json
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "echelon/architecture/transformer_shape.h"
#include "echelon/cluster/device.h"
#include "echelon/cost/expert_load.h"
#include "echelon/cost/operation.h"

namespace echelon::cost {

/// Formulas compute with numbers that may be fractions.
inline double as_double(int64_t value) {
  return static_cast<double>(value);
}

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
  /// The kind of matmul, of `count` times [m, k] and [k, n]; none: the operator
  /// moves `bytes`, or is a view.
  std::optional<cluster::ProductKind> product;
  /// Of a collective: of the matmul that runs meanwhile; count = 0: none.
  int64_t count = 0, m = 0, n = 0, k = 0;
  bool one_weight = false;  // all `count` have the same [k, n]
  double bytes = 0;         // of a collective: of the whole tensor
  bool causal = false;      // attention: no query sees later keys
  int64_t launches = 1;     // kernels
  /// The ranks along `axis` compute the layer together, and this is what they
  /// send.
  std::optional<CollectiveKind> collective;
  Axis axis = Axis::tp;
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
  /// Elements that memory-bound operators of forward read and write; backward
  /// moves about twice as much.
  double moved_elements = 0;
  double output_elements = 0;
  /// The sides of its largest matmul, which decide the rate; rows come from the
  /// samples.
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
  /// Ranks that compute each layer together: its figures are those of one.
  int64_t layer_ranks = 1;
  int64_t seq_len = 0;     // usual; 0 for images
  ExpertLoad expert_load;  // read where experts are shared (ep > 1)

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

/// One JSON object: the model's name, seq_len, and its layers with all their
/// fields.
std::string counted_model_json(const ModelShape& model);

/// Reads it back. Throws DataError with layer and key for a missing key, a
/// negative or infinite figure, or no layer.
ModelShape
parse_counted_model(const std::string& text, const std::string& name);
ModelShape read_counted_model(const std::filesystem::path& path);

}  // namespace echelon::cost
