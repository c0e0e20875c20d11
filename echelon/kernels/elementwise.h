// Elementwise kernels for GPUs: rotary positions, SwiGLU, GELU and dropout,
// each in one pass over memory. They are operators of LibTorch's dispatcher, so
// counts and profiles see each as one, and on meta tensors they give shapes.
// They have no derivatives: the layers that call them are autograd functions.
//
// The functions take tensors of which takes_elementwise() is true, in float32,
// bfloat16 or float16; they compute in float32 and round once.
#pragma once

#include <torch/types.h>

namespace echelon::kernels {

/// Whether the functions below take `x`: on a GPU that has the kernels
/// (uses_kernels), or a meta tensor that stands for one there.
bool takes_elementwise(const torch::Tensor& x);

/// Whether dropout_mask() makes masks for `x`, which may have any dtype.
bool takes_dropout_mask(const torch::Tensor& x);

/// Whether x is rows of adjacent elements at one distance from each other, as
/// features of wider rows are.
bool has_rows(const torch::Tensor& x);

/// (a, b) -> (a cos - b sin, b cos + a sin) for pairs of features of queries
/// and keys; values are copied.
///
///   queries, keys, values
///                 [batch, positions, own heads, size], any strides, size even;
///                 keys and values may be undefined
///   cosine, sine  [positions, size / 2], float32
///   sign          multiplies the sines: -1 rotates back
///   neighbours    features 2 i and 2 i + 1 are a pair, not i and i + size / 2
///   returns       [batch, positions, all heads, size], contiguous
torch::Tensor rotate(
    const torch::Tensor& queries, const torch::Tensor& keys,
    const torch::Tensor& values, const torch::Tensor& cosine,
    const torch::Tensor& sine, double sign, bool neighbours);

/// gate * sigmoid(gate) * up, of two tensors of one shape and dtype. Tensors
/// that lie side by side in wider rows are read there.
torch::Tensor swiglu(const torch::Tensor& gate, const torch::Tensor& up);

/// The gradients of swiglu() to gate and to up, side by side: [..., 2 width]
/// for a gate [..., width].
torch::Tensor swiglu_gradient(
    const torch::Tensor& gradient, const torch::Tensor& gate,
    const torch::Tensor& up);

struct Gelu {
  torch::Tensor gelu;      // as x
  torch::Tensor counters;  // int32, 0: the gradient's kernel counts its blocks
                           // with them, and leaves them as they were
};

/// The tanh form of GELU.
Gelu gelu(const torch::Tensor& x);

struct GeluGradient {
  torch::Tensor x;     // as x
  torch::Tensor bias;  // [width], the sum of x's over all rows [..., width]
};

/// The gradients of gelu() to x, and to a bias that was added to x. Two calls
/// give the same bits.
///
///   counters  gelu()'s; no other call may use them meanwhile
GeluGradient gelu_gradient(
    const torch::Tensor& gradient, const torch::Tensor& x,
    const torch::Tensor& counters);

/// Which elements dropout keeps: those whose word of the Philox stream
/// (layers/philox.h) is at least the threshold.
///
///   first, sample_key  [rows], int64: the word of each row's first element,
///                      not negative, and the key of its sample
///   returns            [rows, width], bool
torch::Tensor dropout_mask(
    const torch::Tensor& first, const torch::Tensor& sample_key, int64_t width,
    uint64_t stream, uint32_t threshold);

/// x * scale where `keep` is true, else 0; plus `residual`, unless it is
/// undefined, in the same dtype and sizes.
torch::Tensor dropout(
    const torch::Tensor& x, const torch::Tensor& keep, double scale,
    const torch::Tensor& residual = {});

}  // namespace echelon::kernels
