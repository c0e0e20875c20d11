#include "echelon/optim/clip.h"

#include <cmath>
#include <map>
#include <string>
#include <utility>

#include "echelon/error.h"

namespace echelon {
namespace {

using Key = std::pair<int, int>;  // device type and index; foreach wants one
using Lists =
    std::map<std::pair<Key, torch::Dtype>, std::vector<torch::Tensor>>;

// Tensors that are defined, in lists of one device and dtype.
Lists lists_of(const std::vector<torch::Tensor>& tensors) {
  Lists lists;
  for (const auto& tensor : tensors) {
    if (!tensor.defined()) continue;
    const auto device = tensor.device();
    lists[{{static_cast<int>(device.type()), device.index()},
           tensor.scalar_type()}]
        .push_back(tensor);
  }
  return lists;
}

Lists gradients_of(const std::vector<torch::Tensor>& parameters) {
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : parameters) {
    gradients.push_back(parameter.grad());
  }
  return lists_of(gradients);
}

torch::Tensor squared_norm(const Lists& lists, torch::Device device) {
  auto sum = torch::zeros({}, torch::dtype(torch::kFloat64).device(device));
  for (const auto& [key, gradients] : lists) {
    const auto norms = at::_foreach_norm(gradients, 2);
    sum += at::stack(norms).to(torch::kFloat64).square_().sum().to(device);
  }
  return sum;
}

double norm_of(
    const Lists& gradients, const std::vector<torch::Tensor>& parameters,
    const SharedOutGradients* shared) {
  const auto device =
      parameters.empty() ? torch::Device(torch::kCPU) : parameters[0].device();
  auto sum =
      squared_norm(shared ? lists_of(shared->counted) : gradients, device);
  if (shared && shared->sum) shared->sum(sum);
  return std::sqrt(sum.item<double>());
}

}  // namespace

double gradient_norm(
    const std::vector<torch::Tensor>& parameters,
    const SharedOutGradients* shared) {
  const torch::NoGradGuard no_grad;
  return norm_of(gradients_of(parameters), parameters, shared);
}

double clip_gradients(
    const std::vector<torch::Tensor>& parameters, double max_norm,
    const SharedOutGradients* shared) {
  if (!(max_norm > 0.0)) {
    throw ConfigError(
        "[optimizer] clip_norm=" + std::to_string(max_norm) +
        ": gradients are clipped to a norm above 0");
  }
  const torch::NoGradGuard no_grad;
  const auto lists = gradients_of(parameters);
  const double norm = norm_of(lists, parameters, shared);
  const double factor = max_norm / (norm + 1e-6);
  if (std::isfinite(norm) && factor < 1.0) {
    for (const auto& [key, gradients] : lists) {
      at::_foreach_mul_(gradients, factor);
    }
  }
  return norm;
}

}  // namespace echelon
