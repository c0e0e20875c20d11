// Norms over the features of each token. With sharded tokens each rank
// normalises its own. Every rank has all parameters, whose gradients are then
// this rank's term of a sum (parallel/tensor/shared_gradients.h).
#pragma once

#include <torch/types.h>

#include <cstdint>

#include "echelon/layers/sharded_module.h"
#include "echelon/parallel/tensor/tensor_parallel.h"

namespace echelon {

/// A residual sum and its norm.
struct NormedSum {
  torch::Tensor sum;
  torch::Tensor norm;
};

/// (x - mean) / sqrt(variance + eps) * weight + bias. weight, bias [hidden].
/// float16 and bfloat16 are normalised in float32.
/// Source: Ba et al., "Layer Normalization", 2016, arXiv:1607.06450.
class LayerNorm : public ShardedModule {
 public:
  LayerNorm(int64_t hidden, double eps, const TensorParallel& parallel);

  /// x [..., hidden] -> the same shape and dtype.
  torch::Tensor forward(const torch::Tensor& x);
  /// x + added, or x where `added` is undefined, and forward() of it; on a GPU
  /// in one kernel, and backward adds up the gradients to the sum in one.
  NormedSum forward_sum(const torch::Tensor& x, const torch::Tensor& added);

  torch::Tensor weight;
  torch::Tensor bias;

 private:
  int64_t hidden_;
  double eps_;
};

/// x / sqrt(mean(x^2) + eps) * weight, or times 1 + weight. weight [hidden].
/// Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019,
/// arXiv:1910.07467.
class RMSNorm : public ShardedModule {
 public:
  /// `of_heads`: the rows are heads, of which each rank has others, so that the
  /// gradient is a term of a sum however tokens are sharded. `add_one`: as
  /// gemma, whose weights begin at 0.
  RMSNorm(
      int64_t hidden, double eps, const TensorParallel& parallel,
      bool of_heads = false, bool add_one = false);

  /// x [..., hidden] -> the same shape and dtype.
  torch::Tensor forward(const torch::Tensor& x);
  /// x + added, or x where `added` is undefined, and forward() of it; on a GPU
  /// in one kernel, and backward adds up the gradients to the sum in one.
  NormedSum forward_sum(const torch::Tensor& x, const torch::Tensor& added);

  torch::Tensor weight;

 private:
  double eps_;
  bool add_one_;
};

/// The computation of RMSNorm, for other modules. float16 and bfloat16 are
/// normalised in float32. One node of the graph, which stores x and one number
/// per row.
torch::Tensor
rms_norm(const torch::Tensor& x, const torch::Tensor& weight, double eps);

}  // namespace echelon
