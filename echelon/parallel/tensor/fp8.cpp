// GPUs multiply 8-bit matrices whose memory runs along the summed dimension on
// both sides. On other devices the same numbers are multiplied in float32, so
// that tests see what a GPU computes.
#include "echelon/parallel/tensor/fp8.h"

#include <torch/types.h>

#include <cmath>
#include <utility>

#include "echelon/kernels/fp8.h"
#include "echelon/layers/computing_device.h"

namespace echelon::detail {
namespace {

using torch::Tensor;

constexpr int64_t kMultiple = 16;

bool fits(int64_t size) {
  return size > 0 && size % kMultiple == 0;
}

// What kernels::round_to_fp8 computes, by LibTorch's operators.
kernels::Fp8Values rounded(const Tensor& matrix, bool gradient) {
  // The norm of infinite order is the largest magnitude, in one pass.
  const auto largest = at::linalg_vector_norm(
      matrix, INFINITY, std::nullopt, /*keepdim=*/false, torch::kFloat32);
  const auto scale = largest.clamp_min(1e-30).div_(gradient ? 57344 : 448);
  // In float32: a quotient that bf16 had rounded could be rounded once more to
  // another number.
  return {
      .rows = matrix.to(torch::kFloat32)
                  .div_(scale)
                  .to(gradient ? torch::kFloat8_e5m2 : torch::kFloat8_e4m3fn),
      .columns = {},
      .scale = scale};
}

}  // namespace

Factor::Factor(const Tensor& matrix, Of of, bool fp8, Sides sides)
    : matrix_(matrix) {
  if (!fp8 || matrix.numel() == 0) return;
  // Its memory as rows.
  const bool flipped = !matrix.is_contiguous() && matrix.t().is_contiguous();
  const Tensor base = flipped ? matrix.t() : matrix.contiguous();
  // Features, which each product has in a place where they must fit.
  if (!fits(base.size(1))) return;
  if (flipped) std::swap(sides.left, sides.right);
  const bool gradient = of == Of::gradient;
  const bool columns = sides.right && fits(base.size(0));
  auto values = kernels::takes_fp8(base)
                    ? kernels::round_to_fp8(
                          base, gradient, sides.left || !columns, columns)
                    : rounded(base, gradient);
  scale_ = values.scale;
  left_ = values.rows;
  right_ = values.columns;
  if (flipped) std::swap(left_, right_);
}

Factor Factor::t() const {
  Factor other = *this;
  other.matrix_ = matrix_.t();
  std::swap(other.left_, other.right_);
  return other;
}

Factor Factor::rows(const TokenRows& place) const {
  Factor some = *this;
  some.matrix_ = place.of(matrix_);
  if (scale_.defined()) {
    some.left_ = place.of(for_left());
    some.right_ = Tensor();
  }
  return some;
}

Factor Factor::of_batch(int64_t at) const {
  Factor one = *this;
  one.matrix_ = matrix_[at];
  if (scale_.defined()) one.left_ = left_[at];
  return one;
}

Tensor Factor::for_left() const {
  return left_.defined() ? left_ : right_.t().contiguous();
}

Tensor Factor::for_right() const {
  return right_.defined() ? right_ : left_.t().contiguous();
}

// The matrix for each of a batch; no number is copied.
Tensor Factor::for_batch(const Factor& left) const {
  return matrix_.expand({left.matrix_.size(0), -1, -1});
}

// A meta tensor that stands for no GPU's counts products of the dtype of the
// matrices.
bool Factor::in_8_bits(const Factor& left, const Factor& right) {
  const bool counted_elsewhere =
      left.matrix_.is_meta() && computing_device(left.matrix_) != torch::kCUDA;
  return left.scale_.defined() && right.scale_.defined() &&
         left.row_count() > 0 && fits(right.row_count()) &&
         fits(right.columns()) && !counted_elsewhere;
}

void Factor::multiply(
    Tensor y, const Factor& left, const Factor& right, const Tensor& bias) {
  if (!in_8_bits(left, right)) {
    if (left.is_batch()) {
      at::bmm_out(y, left.matrix_, right.for_batch(left));
      if (bias.defined()) y.add_(bias);
    } else if (bias.defined()) {
      at::addmm_out(y, bias, left.matrix_, right.matrix_);
    } else {
      at::mm_out(y, left.matrix_, right.matrix_);
    }
    return;
  }
  if (left.is_batch()) {
    for (int64_t at = 0; at < y.size(0); ++at) {
      multiply(y[at], left.of_batch(at), right, bias);
    }
    return;
  }
  const auto a = left.for_left(), b = right.for_right();
  if (computing_device(y) == torch::kCUDA) {
    kernels::multiply_fp8(y, a, b, left.scale_, right.scale_);
  } else {
    y.copy_(at::mm(a.to(torch::kFloat32), b.to(torch::kFloat32).t())
                .mul_(left.scale_ * right.scale_));
  }
  if (bias.defined()) y.add_(bias);
}

void Factor::multiply_add(Tensor y, const Factor& left, const Factor& right) {
  if (!in_8_bits(left, right)) {
    if (left.is_batch()) {
      y.baddbmm_(left.matrix_, right.for_batch(left));
    } else {
      y.addmm_(left.matrix_, right.matrix_);
    }
    return;
  }
  const auto more = at::empty(y.sizes(), y.options());
  multiply(more, left, right);
  y.add_(more);
}

}  // namespace echelon::detail
