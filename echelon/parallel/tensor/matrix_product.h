// The products of a linear layer, with weights used as they lie: [out, in] or
// [in, out]. For the .cpp files of this folder.
#pragma once

#include <torch/types.h>

#include <cstdint>

#include "echelon/parallel/tensor/linear.h"

namespace echelon::detail {

/// x [..., features] as [rows, features].
inline torch::Tensor as_rows(const torch::Tensor& x) {
  if (x.dim() == 2) return x;
  return x.dim() == 1 ? x.unsqueeze(0) : x.flatten(0, -2);
}

/// `like`'s sizes with another number of features.
inline std::vector<int64_t>
with_features(const torch::Tensor& like, int64_t features) {
  auto sizes = like.sizes().vec();
  sizes.back() = features;
  return sizes;
}

/// The weight as a matrix [in, out]: a view.
inline torch::Tensor
in_by_out(const torch::Tensor& weight, WeightLayout layout) {
  return layout == WeightLayout::in_out ? weight : weight.t();
}

inline int64_t outputs_of(const torch::Tensor& weight, WeightLayout layout) {
  return weight.size(layout == WeightLayout::in_out ? 1 : 0);
}

/// y [rows, out] <- x [rows, in] times the weight, plus the bias if defined.
inline void product_out(
    torch::Tensor y, const torch::Tensor& x, const LinearWeights& weights,
    WeightLayout layout) {
  const auto weight = in_by_out(weights.weight, layout);
  if (weights.bias.defined()) {
    at::addmm_out(y, weights.bias, x, weight);
  } else {
    at::mm_out(y, x, weight);
  }
}

/// x [rows, in] <- the gradient of x (`add`: += ), from that of y.
inline void input_gradient_out(
    torch::Tensor x, const torch::Tensor& y, const torch::Tensor& weight,
    WeightLayout layout, bool add) {
  const auto back = in_by_out(weight, layout).t();
  if (add) {
    x.addmm_(y, back);
  } else {
    at::mm_out(x, y, back);
  }
}

/// As the weight lies.
inline torch::Tensor weight_gradient(
    const torch::Tensor& x, const torch::Tensor& y, WeightLayout layout) {
  return layout == WeightLayout::in_out ? x.t().mm(y) : y.t().mm(x);
}

/// What the functions remember beside tensors.
struct LinearCall : torch::CustomClassHolder {
  WeightLayout layout = WeightLayout::out_in;
  TensorParallel parallel;
  int64_t tokens = 0;
  std::string label;
  std::vector<bool> has_bias;  // of each product
};

}  // namespace echelon::detail
