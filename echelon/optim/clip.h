// The norm of all gradients, and clipping by it.
// Source: Pascanu et al., "On the difficulty of training recurrent neural
// networks", 2013, arXiv:1211.5063, section 3.2.
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <functional>
#include <map>
#include <tuple>
#include <vector>

namespace echelon {

/// Sums numbers over the ranks that hold other parts of the gradients. Called
/// once per norm, on every rank; `squared_norm` is a float64 scalar, or a list
/// of them, on any device. Empty: this rank holds all of them.
using SumOverRanks = std::function<void(torch::Tensor& squared_norm)>;

/// The gradients of a model that are partitioned over ranks. Each element of
/// each gradient of the whole model is in `counted` of exactly one of the ranks
/// that `sum` sums over, though several ranks may hold copies of it, or parts
/// that overlap.
struct PartitionedGradients {
  std::vector<torch::Tensor> counted;  // gradients, or views of parts of them
  SumOverRanks sum;
  /// parts[i] is the index of the model part that counted[i] belongs to.
  std::vector<size_t> parts;
};

/// The square root of the sum of squares over the gradients of `parameters`;
/// parameters without a gradient count as zero. NaN or infinite when a gradient
/// is. Waits for the device.
///
///   shared  null: this rank has all gradients
double gradient_norm(
    const std::vector<torch::Tensor>& parameters,
    const PartitionedGradients* shared = nullptr);

/// Multiplies every gradient by min(1, max_norm / (norm + 1e-6)), in place, as
/// torch.nn.utils.clip_grad_norm_ does, and returns the norm before that.
///
/// A norm that is not finite is returned and the gradients stay as they are:
/// the caller decides whether to skip the step or to stop. Throws ConfigError
/// unless max_norm > 0.
double clip_gradients(
    const std::vector<torch::Tensor>& parameters, double max_norm,
    const PartitionedGradients* shared = nullptr);

/// gradient_norm() without a wait: a float64 scalar on the device of the first
/// parameter.
torch::Tensor gradient_norm_on_device(
    const std::vector<torch::Tensor>& parameters,
    const PartitionedGradients* shared = nullptr);
/// What clip_gradients() multiplies by, for Optimizer::step(): 1 where the norm
/// is small or not finite. float64, where `norm` is. Throws as it does.
torch::Tensor clip_factor(const torch::Tensor& norm, double max_norm);

namespace detail {

/// Device type, device index, dtype: the tensors of a foreach or fused kernel
/// agree in these.
using TensorKind = std::tuple<int, int, torch::Dtype>;
TensorKind kind_of(const torch::Tensor& tensor);

/// The tensors that are defined and not empty, by kind.
std::map<TensorKind, std::vector<torch::Tensor>>
by_kind(const std::vector<torch::Tensor>& tensors);

/// `tensor` on `device`. A copy to the host is waited for, because kernels of
/// the CPU read it at once; any other is only queued.
torch::Tensor
moved(const torch::Tensor& tensor, torch::Device device, torch::Dtype dtype);

/// Multiplies tensors of one kind by a scalar, in place, and rounds each number
/// once.
void multiply(
    const std::vector<torch::Tensor>& tensors, const torch::Tensor& factor);

}  // namespace detail
}  // namespace echelon
