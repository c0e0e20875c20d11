// RMSNorm and LayerNorm with the residual sum before them, for GPUs: forward in
// one pass over memory, and backward in one, with the gradient that comes to
// the sum beside the norm. They are operators of LibTorch's dispatcher, so
// counts and profiles see each as one, and on meta tensors they give shapes.
// They have no derivatives: parallel/tensor/norm.h has autograd functions.
//
// Tensors are float32, bfloat16 or float16, all of one dtype; the sum is
// rounded to it, and the norm of what that gives is computed in float32 and
// rounded once.
#pragma once

#include <torch/types.h>

namespace echelon::kernels {

/// Threads of a block, at most, and a row's elements for each, where several
/// fit in one access and where not.
inline constexpr int64_t kNormThreads = 512;
inline constexpr int64_t kNormValues = 16;
inline constexpr int64_t kSingleNormValues = 8;

/// Blocks whose sums for the parameters' gradients one block adds up, and the
/// counters of blocks and of such groups.
inline constexpr int64_t kNormGroup = 24;
inline constexpr int64_t kNormCounters = 48;

/// Whether the functions below take rows like `x` [..., width] with weights
/// like `weight` [width]: on a GPU that has the kernels (uses_kernels), or meta
/// tensors that stand for such; not wider than a block's registers hold (8192,
/// or 4096 where rows are not a multiple of 16 bytes).
bool takes_norm(const torch::Tensor& x, const torch::Tensor& weight);

struct ResidualNorm {
  torch::Tensor norm;        // as x
  torch::Tensor sum;         // x + added; undefined without `added`
  torch::Tensor statistics;  // [2, rows + kNormCounters], float32:
                             // 1 / deviation, mean; [1, …] without bias. The
                             // first row ends with counters, which are 0: the
                             // gradient's kernel counts its blocks with them,
                             // and leaves them as they were
};

/// (sum - mean) / sqrt(variance + eps) * weight + bias, or, with an undefined
/// bias, sum / sqrt(mean(sum^2) + eps) * weight.
///
///   x, added      [..., width]; undefined `added`: the sum is x
///   weight, bias  [width]
ResidualNorm residual_norm(
    const torch::Tensor& x, const torch::Tensor& added,
    const torch::Tensor& weight, const torch::Tensor& bias, double eps);

struct ResidualNormGradient {
  torch::Tensor sum;         // as x
  torch::Tensor parameters;  // [2, width]: of weight and bias; [1, width]
                             // without bias; undefined if not `for_parameters`
};

/// The gradients to the sum, and to the parameters.
///
///   gradient    that of the norm, as x
///   passed      what came to the sum beside it, added; undefined: none
///   x           what was normalised
///   statistics  residual_norm()'s; no other call may use them meanwhile
///
/// Two calls give the same bits.
ResidualNormGradient residual_norm_gradient(
    const torch::Tensor& gradient, const torch::Tensor& passed,
    const torch::Tensor& x, const torch::Tensor& weight,
    const torch::Tensor& statistics, bool for_parameters);

}  // namespace echelon::kernels
