// Matrix products in 8 bits, for the .cpp files of this folder. A matrix is
// rounded with one scale for all of its numbers, which its largest number
// decides ("current scaling"). Weights and activations are e4m3 (4 bits of
// exponent, 3 of fraction), gradients e5m2. Products are summed in float32.
//
// Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022,
// arXiv:2209.05433.
#pragma once

#include <torch/types.h>

#include <cstdint>

#include "echelon/parallel/tensor/token_rows.h"

namespace echelon::detail {

/// A matrix that takes part in products, and what it is in 8 bits.
class Factor {
 public:
  enum class Of { forward, gradient };
  /// The sides of products that it is on: its numbers of 8 bits are laid out
  /// for them. For another side they are copied there.
  struct Sides {
    bool left = true;
    bool right = false;
  };

  /// `fp8`: rounds it, once for all products.
  Factor(const torch::Tensor& matrix, Of of, bool fp8, Sides sides);

  int64_t row_count() const { return matrix_.size(-2); }
  int64_t columns() const { return matrix_.size(-1); }
  /// The transposed matrix, which is on the other side; no number is copied.
  Factor t() const;
  /// Some rows, with the scale of all, for the left side: a batch of matrices
  /// where they are of several ranks.
  Factor rows(const TokenRows& place) const;

  /// y [m, n] = left [m, k] times right [k, n], plus `bias` [n] where it is
  /// defined; or added to y. In 8 bits where both are rounded, and k and n are
  /// multiples of 16, which GPUs ask for. y has the dtype of the matrices. Of a
  /// batch, y and left are [batch, m, …].
  static void multiply(
      torch::Tensor y, const Factor& left, const Factor& right,
      const torch::Tensor& bias = {});
  static void
  multiply_add(torch::Tensor y, const Factor& left, const Factor& right);

 private:
  static bool in_8_bits(const Factor& left, const Factor& right);
  bool is_batch() const { return matrix_.dim() == 3; }
  Factor of_batch(int64_t at) const;
  torch::Tensor for_batch(const Factor& left) const;
  torch::Tensor for_left() const;   // [rows, columns], contiguous
  torch::Tensor for_right() const;  // [columns, rows], contiguous

  torch::Tensor matrix_;
  torch::Tensor left_;   // what for_left() returns, if it is there
  torch::Tensor right_;  // what for_right() returns, if it is there
  torch::Tensor scale_;  // float32, no dimensions; undefined: not rounded
};

}  // namespace echelon::detail
