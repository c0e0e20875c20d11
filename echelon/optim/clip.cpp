#include "echelon/optim/clip.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace detail {

TensorKind kind_of(const torch::Tensor& tensor) {
  const auto device = tensor.device();
  return {
      static_cast<int>(device.type()), device.index(), tensor.scalar_type()};
}

std::map<TensorKind, std::vector<torch::Tensor>>
by_kind(const std::vector<torch::Tensor>& tensors) {
  std::map<TensorKind, std::vector<torch::Tensor>> lists;
  for (const auto& tensor : tensors) {
    if (!tensor.defined() || tensor.numel() == 0) continue;
    lists[kind_of(tensor)].push_back(tensor);
  }
  return lists;
}

torch::Tensor
moved(const torch::Tensor& tensor, torch::Device device, torch::Dtype dtype) {
  return tensor.to(device, dtype, /*non_blocking=*/!device.is_cpu());
}

// The kernel of loss scaling takes a factor that 16 bits may not represent, and
// all tensors in one launch. Its factor is too coarse for float64.
void multiply(
    const std::vector<torch::Tensor>& tensors, const torch::Tensor& factor) {
  const auto& first = tensors.front();
  if (first.scalar_type() == torch::kFloat64) {
    at::_foreach_mul_(tensors, moved(factor, first.device(), torch::kFloat64));
    return;
  }
  auto found =
      torch::empty({1}, torch::dtype(torch::kFloat32).device(first.device()));
  at::_amp_foreach_non_finite_check_and_unscale_(
      tensors, found,
      moved(factor, first.device(), torch::kFloat32).reshape({1}));
}

}  // namespace detail

namespace {

using GradientLists = std::map<detail::TensorKind, std::vector<torch::Tensor>>;

GradientLists gradients_of(const std::vector<torch::Tensor>& parameters) {
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : parameters) {
    gradients.push_back(parameter.grad());
  }
  return detail::by_kind(gradients);
}

torch::Tensor norm_of(
    const GradientLists& own, const std::vector<torch::Tensor>& parameters,
    const PartitionedGradients* shared) {
  const auto device =
      parameters.empty() ? torch::Device(torch::kCPU) : parameters[0].device();
  auto sum = torch::zeros({}, torch::dtype(torch::kFloat64).device(device));
  for (const auto& [kind, gradients] :
       shared ? detail::by_kind(shared->counted) : own) {
    const auto norms = at::_foreach_norm(gradients, 2);
    sum += detail::moved(
        at::stack(norms).to(torch::kFloat64).square_().sum(), device,
        torch::kFloat64);
  }
  if (shared && shared->sum) shared->sum(sum);
  return sum.sqrt_();
}

}  // namespace

torch::Tensor gradient_norm_on_device(
    const std::vector<torch::Tensor>& parameters,
    const PartitionedGradients* shared) {
  const torch::NoGradGuard no_grad;
  return norm_of(gradients_of(parameters), parameters, shared);
}

torch::Tensor clip_factor(const torch::Tensor& norm, double max_norm) {
  if (!(max_norm > 0.0)) {
    throw ConfigError(format(
        "[optimizer] clip_norm={:f}: gradients are clipped to a norm above 0",
        max_norm));
  }
  if (norm.is_cpu()) {  // one operator in place of six
    const double known = norm.item<double>();
    const double factor =
        std::isfinite(known) ? std::min(1.0, max_norm / (known + 1e-6)) : 1.0;
    return torch::scalar_tensor(factor, torch::kFloat64);
  }
  return at::where(
      at::isfinite(norm), (max_norm / (norm + 1e-6)).clamp_max_(1.0), 1.0);
}

double gradient_norm(
    const std::vector<torch::Tensor>& parameters,
    const PartitionedGradients* shared) {
  return gradient_norm_on_device(parameters, shared).item<double>();
}

double clip_gradients(
    const std::vector<torch::Tensor>& parameters, double max_norm,
    const PartitionedGradients* shared) {
  const torch::NoGradGuard no_grad;
  const auto lists = gradients_of(parameters);
  const auto norm = norm_of(lists, parameters, shared);
  const auto factor = clip_factor(norm, max_norm);
  if (factor.item<double>() != 1.0) {  // a look saves a pass over the gradients
    for (const auto& [kind, gradients] : lists) {
      detail::multiply(gradients, factor);
    }
  }
  return norm.item<double>();
}

}  // namespace echelon
