// Attention of some queries to one block of keys, and the sum of such results.
// For the .cpp files of this folder; without autograd.
//
// A block gives each query the mean of its values under the softmax of its
// scores, and their log-sum-exp. The results of two blocks are merged by the
// latter: out = out_a + sigmoid(lse_b - lse_a) * (out_b - out_a). Milakov and
// Gimelshein, "Online normalizer calculation for softmax", 2018,
// arXiv:1805.02867; Dao et al., "FlashAttention", 2022, arXiv:2205.14135.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <vector>

#include "echelon/parallel/context/attention.h"

namespace echelon::detail {

/// Tensors here have heads before tokens: [batch, heads, tokens, size]. Queries
/// and gradients have `heads`, keys and values `kv_heads`.
class BlockAttention {
 public:
  /// `like`: a tensor of the dtype and device of the queries.
  BlockAttention(
      const ContextAttentionCall& call, int64_t kv_heads,
      const torch::Tensor& like);

  /// Whether scores need no mask but that of a causal rectangle, so that a
  /// fused kernel takes them and rectangles may be merged.
  bool fused() const { return kernel_ != Kernel::none; }

  /// The rectangles in which queries at some positions see some keys.
  std::vector<ScoreBlock> blocks_of(
      const std::vector<IndexRange>& queries,
      const std::vector<IndexRange>& keys) const;

  struct Result {
    torch::Tensor out;  // [batch, heads, rows, size], in the dtype of sums
    torch::Tensor lse;  // [batch, heads, rows]; minus infinity: sees no key
  };
  Result forward(
      const torch::Tensor& query, const torch::Tensor& key,
      const torch::Tensor& value, const ScoreBlock& block) const;

  /// What all queries of a rank have computed, for backward.
  struct Saved {
    torch::Tensor gradient;  // of `out`
    torch::Tensor query;
    torch::Tensor out;    // over all blocks
    torch::Tensor lse;    // over all blocks
    torch::Tensor delta;  // [batch, heads, rows], sums of gradient * out;
                          // undefined when fused
  };
  struct Gradients {
    torch::Tensor query;  // of the block's rows
    torch::Tensor key;    // of its columns, for kv_heads
    torch::Tensor value;
  };
  Gradients backward(
      const Saved& saved, const torch::Tensor& key, const torch::Tensor& value,
      const ScoreBlock& block) const;

 private:
  /// Fused kernels of LibTorch: `flash` and `efficient` are those of CUDA, the
  /// latter for more dtypes.
  enum class Kernel : uint8_t { none, cpu, flash, efficient };
  static Kernel
  kernel_for(const ContextAttentionCall& call, const torch::Tensor& like);
  Result fused_forward(
      const torch::Tensor& query, const torch::Tensor& key,
      const torch::Tensor& value, bool causal) const;
  /// `lse` is over all blocks, as `out` is. The gradients are of the queries'
  /// heads.
  Gradients fused_backward(
      const torch::Tensor& gradient, const torch::Tensor& query,
      const torch::Tensor& key, const torch::Tensor& value,
      const torch::Tensor& out, const torch::Tensor& lse, bool causal) const;
  double scale_of(const torch::Tensor& query) const;
  torch::Tensor for_queries(const torch::Tensor& kv) const;
  torch::Tensor for_keys(const torch::Tensor& gradient) const;
  torch::Tensor scores(
      const torch::Tensor& query, const torch::Tensor& key,
      const ScoreBlock& block, const IndexRange& rows) const;
  torch::Tensor kept(
      const torch::Tensor& probabilities, const ScoreBlock& block,
      const IndexRange& rows) const;
  bool sees_any(const ScoreBlock& block) const;

  const ContextAttentionCall& call_;
  int64_t kv_heads_;
  torch::Dtype sums_;
  Kernel kernel_;
  int64_t group_ = 1;      // query heads per key/value head; 0: they differ
  torch::Tensor indices_;  // kv_of_query, where they differ
};

/// Merges the results of blocks.
class MergedAttention {
 public:
  /// `rows`: of all queries here.
  explicit MergedAttention(int64_t rows) : rows_(rows) {}

  void add(const IndexRange& rows, BlockAttention::Result result);
  const torch::Tensor& out() const { return out_; }
  const torch::Tensor& lse() const { return lse_; }

 private:
  int64_t rows_;
  torch::Tensor out_;
  torch::Tensor lse_;
};

}  // namespace echelon::detail
