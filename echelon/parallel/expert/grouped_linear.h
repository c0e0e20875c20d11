// The products of a mixture's experts: each has rows of its own.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <vector>

#include "echelon/parallel/expert/row_counts.h"

namespace echelon {

/// The rows of each expert times its matrix, one expert after the other.
///
///   rows     [sum of counts, in]: those of weights[0] first
///   counts   the rows of each; may be 0. The host reads them unless one kernel
///            computes all
///   weights  one for each expert, all [out, in]
///   share    multiplies the weights' gradients, which are views of one tensor;
///            those of experts without rows are zeros
///   returns  [sum of counts, out]
///
/// On GPUs from compute capability 9.0 one kernel computes all products in
/// bfloat16, LibTorch's _grouped_mm, where the weights lie at even distances in
/// memory, as in the flat buffers of parallel/shard, and both of their sizes
/// are multiples of 8. Else there is a product for each expert. Differentiable
/// any number of times.
torch::Tensor grouped_linear(
    const torch::Tensor& rows, const RowCounts& counts,
    const std::vector<torch::Tensor>& weights, double share);

namespace detail {

/// Tensors of one shape that lie at even distances in memory, as one tensor
/// with a further first dimension: a view. Undefined where they do not.
torch::Tensor stacked_in_memory(const std::vector<torch::Tensor>& tensors);

/// The products as one call of _grouped_mm: `weights` is stacked_in_memory.
torch::Tensor grouped_product(
    const torch::Tensor& rows, const RowCounts& counts,
    const torch::Tensor& weights);
/// The gradients of the weights, [experts, out, in], by one call.
torch::Tensor grouped_gradient(
    const torch::Tensor& rows, const RowCounts& counts,
    const torch::Tensor& gradient);

}  // namespace detail
}  // namespace echelon
