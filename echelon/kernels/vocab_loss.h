// The kernels of the loss over a vocabulary, for GPUs. They are operators of
// LibTorch's dispatcher, so counts and profiles see each as one, and on meta
// tensors they give shapes.
#pragma once

#include <torch/types.h>

namespace echelon::kernels {

/// Threads of a block, which has a row.
inline constexpr int kVocabLossThreads = 512;

/// Whether the functions below take `rows`: a matrix of float32, bfloat16 or
/// float16 with adjacent elements in a row, on a GPU that has the kernels
/// (uses_kernels); or a meta tensor that stands for one.
bool takes(const torch::Tensor& rows);

/// For each row its largest logit, the sum of exp(logit - largest) and the
/// target's logit.
///
///   rows     [n, width]
///   ids      [n], int64: the column of each row's target; others than 0 to
///            width - 1 have the logit 0
///   returns  [3, n], float32
torch::Tensor vocab_sums(const torch::Tensor& rows, const torch::Tensor& ids);

/// (exp(logit - total) - one at the target) times scale.
///
///   total, scale  [n], float32
///   returns       a tensor like rows, with as much room behind each row
torch::Tensor vocab_gradient(
    const torch::Tensor& rows, const torch::Tensor& ids,
    const torch::Tensor& total, const torch::Tensor& scale);

}  // namespace echelon::kernels
