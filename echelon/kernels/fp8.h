// Rounding of matrices to 8 bits, and their products, on GPUs. As the kernels
// of elementwise.h, these are operators without derivatives.
#pragma once

#include <torch/types.h>

namespace echelon::kernels {

/// Whether round_to_fp8 takes `matrix`: contiguous, of float32, bfloat16 or
/// float16, with rows of a multiple of 16 numbers, on a GPU or a meta tensor
/// that stands for one there.
bool takes_fp8(const torch::Tensor& matrix);

/// Numbers that are values * scale.
struct Fp8Values {
  torch::Tensor rows;     // [rows, columns], contiguous; undefined: not asked
  torch::Tensor columns;  // [columns, rows], contiguous; undefined: not asked
  torch::Tensor scale;    // float32, no dimensions
};

/// The matrix [rows, columns] as numbers of 8 bits, rounded to the nearest,
/// with a scale that makes the largest of them the largest of the format: e4m3,
/// or e5m2 for a gradient. `columns` asks for rows that are a multiple of 16.
Fp8Values round_to_fp8(
    const torch::Tensor& matrix, bool gradient, bool rows, bool columns);

/// Writes the product of two matrices of 8 bits, summed in float32, to y [m, n]
/// in bfloat16, float16 or float32. k and n are multiples of 16.
///
///   left   [m, k], contiguous
///   right  [n, k], contiguous: the transposed right-hand matrix
void multiply_fp8(
    torch::Tensor y, const torch::Tensor& left, const torch::Tensor& right,
    const torch::Tensor& left_scale, const torch::Tensor& right_scale);

}  // namespace echelon::kernels
