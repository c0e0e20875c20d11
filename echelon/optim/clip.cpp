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

double norm_of(
    const GradientLists& own, const std::vector<torch::Tensor>& parameters,
    const PartitionedGradients* shared) {
  const auto device =
      parameters.empty() ? torch::Device(torch::kCPU) : parameters[0].device();
  auto sum = torch::zeros({}, torch::dtype(torch::kFloat64).device(device));
  for (const auto& [kind, gradients] :
       shared ? detail::by_kind(shared->counted) : own) {
    const auto norms = at::_foreach_norm(gradients, 2);
    sum += at::stack(norms).to(torch::kFloat64).square_().sum().to(device);
  }
  if (shared && shared->sum) shared->sum(sum);
  return std::sqrt(sum.item<double>());
}

}  // namespace

double gradient_norm(
    const std::vector<torch::Tensor>& parameters,
    const PartitionedGradients* shared) {
  const torch::NoGradGuard no_grad;
  return norm_of(gradients_of(parameters), parameters, shared);
}

double clip_gradients(
    const std::vector<torch::Tensor>& parameters, double max_norm,
    const PartitionedGradients* shared) {
  if (!(max_norm > 0.0)) {
    throw ConfigError(format(
        "[optimizer] clip_norm={:f}: gradients are clipped to a norm above 0",
        max_norm));
  }
  const torch::NoGradGuard no_grad;
  const auto lists = gradients_of(parameters);
  const double norm = norm_of(lists, parameters, shared);
  const double factor = max_norm / (norm + 1e-6);
  if (std::isfinite(norm) && factor < 1.0) {
    for (const auto& [kind, gradients] : lists) {
      at::_foreach_mul_(gradients, factor);
    }
  }
  return norm;
}

}  // namespace echelon
