// The norm of all gradients, and clipping by it.
// Source: Pascanu et al., "On the difficulty of training recurrent neural
// networks", 2013, arXiv:1211.5063, section 3.2.
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <functional>
#include <vector>

namespace echelon {

/// Sums numbers over the ranks that hold other parts of the gradients. Called
/// once per norm, on every rank; `squared_norm` is a float64 scalar, or a list
/// of them, on any device. Empty: this rank holds all of them.
using SumOverRanks = std::function<void(torch::Tensor& squared_norm)>;

/// The gradients of a model that ranks share out: each element of each gradient
/// of the whole model is in `counted` of exactly one of the ranks that `sum`
/// sums over, though copies of it, and overlapping parts, may lie on several.
struct SharedOutGradients {
  std::vector<torch::Tensor> counted;  // gradients, or views of parts of them
  SumOverRanks sum;
  /// Of the model's parts, by its own count, which one each of `counted` is of.
  std::vector<size_t> parts;
};

/// sqrt of the sum of squares over the gradients of `parameters`; parameters
/// without a gradient count as zero. NaN or infinite when a gradient is.
/// Waits for the device.
///
///   shared  null: all gradients are here
double gradient_norm(
    const std::vector<torch::Tensor>& parameters,
    const SharedOutGradients* shared = nullptr);

/// Multiplies every gradient by min(1, max_norm / (norm + 1e-6)), in place, as
/// torch.nn.utils.clip_grad_norm_ does, and returns the norm before that.
///
/// A norm that is not finite is returned and the gradients stay as they are:
/// the caller decides whether to skip the step or to stop. Throws ConfigError
/// unless max_norm > 0.
double clip_gradients(
    const std::vector<torch::Tensor>& parameters, double max_norm,
    const SharedOutGradients* shared = nullptr);

}  // namespace echelon
