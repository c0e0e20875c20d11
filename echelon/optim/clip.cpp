#include "echelon/optim/clip.h"

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

torch::Tensor clip_gradients_on_device(
    const std::vector<torch::Tensor>& parameters, double max_norm,
    const PartitionedGradients* shared) {
  if (!(max_norm > 0.0)) {
    throw ConfigError(format(
        "[optimizer] clip_norm={:f}: gradients are clipped to a norm above 0",
        max_norm));
  }
  const torch::NoGradGuard no_grad;
  const auto lists = gradients_of(parameters);
  const auto norm = norm_of(lists, parameters, shared);
  if (norm.is_cpu()) {  // a look at it saves a pass over the gradients
    const double factor = max_norm / (norm.item<double>() + 1e-6);
    if (!std::isfinite(norm.item<double>()) || factor >= 1.0) return norm;
  }
  // 1 where the norm is small or not finite.
  const auto factor = at::where(
      at::isfinite(norm), (max_norm / (norm + 1e-6)).clamp_max_(1.0), 1.0);
  for (const auto& [kind, gradients] : lists) {
    const auto& first = gradients.front();
    at::_foreach_mul_(
        gradients, detail::moved(factor, first.device(), factor.scalar_type()));
  }
  return norm;
}

double gradient_norm(
    const std::vector<torch::Tensor>& parameters,
    const PartitionedGradients* shared) {
  return gradient_norm_on_device(parameters, shared).item<double>();
}

double clip_gradients(
    const std::vector<torch::Tensor>& parameters, double max_norm,
    const PartitionedGradients* shared) {
  return clip_gradients_on_device(parameters, max_norm, shared).item<double>();
}

}  // namespace echelon
