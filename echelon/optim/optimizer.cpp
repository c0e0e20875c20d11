#include "echelon/optim/optimizer.h"

#include <map>
#include <set>
#include <sstream>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

#include "echelon/error.h"

namespace echelon {
namespace {

std::string place(const std::string& name) {
  return "the optimizer's parameter \"" + name + "\"";
}

// The fused kernels walk over raw memory: parameter, gradient and state must
// have the same dtype and order of elements.
void check_parameter(const std::string& name, const torch::Tensor& parameter) {
  if (!parameter.defined() || !parameter.is_floating_point() ||
      !parameter.is_non_overlapping_and_dense()) {
    throw ConfigError(
        place(name) +
        " must be a floating-point tensor that fills its memory; pass "
        "parameters, not strided views of them");
  }
  if (!parameter.is_leaf()) {
    throw ConfigError(
        place(name) +
        " is the result of a computation; pass the leaf that it "
        "is computed from");
  }
}

void check_groups(const std::vector<ParameterGroup>& groups) {
  std::unordered_set<std::string> names;
  std::unordered_map<const void*, std::string> tensors;
  for (const auto& group : groups) {
    for (const auto& [name, parameter] : group.parameters) {
      check_parameter(name, parameter);
      if (!names.insert(name).second) {
        throw ConfigError(place(name) + " is listed twice; list it once");
      }
      const auto [other, is_new] =
          tensors.emplace(parameter.unsafeGetTensorImpl(), name);
      if (!is_new) {
        throw ConfigError(
            place(name) + " is the same tensor as \"" + other->second +
            "\"; list it once");
      }
    }
  }
}

torch::Tensor
matching_gradient(const std::string& name, const torch::Tensor& parameter) {
  const auto& gradient = parameter.grad();
  if (gradient.is_sparse()) {
    throw ConfigError(
        place(name) +
        " has a sparse gradient; make it dense (embedding with "
        "sparse=false)");
  }
  if (gradient.scalar_type() == parameter.scalar_type() &&
      gradient.strides() == parameter.strides()) {
    return gradient;
  }
  return torch::empty_like(parameter).copy_(gradient);
}

}  // namespace

Optimizer::Optimizer(std::vector<ParameterGroup> groups, double learning_rate)
    : groups_(std::move(groups)), learning_rate_(learning_rate) {
  check_groups(groups_);
}

void Optimizer::step() {
  const torch::NoGradGuard no_grad;
  size_t index = 0;
  for (const auto& group : groups_) {
    std::map<std::tuple<torch::Dtype, int, int>, Batch> batches;
    for (const auto& [name, parameter] : group.parameters) {
      if (parameter.grad().defined()) {
        const auto device = parameter.device();
        auto& batch = batches[{
            parameter.scalar_type(), static_cast<int>(device.type()),
            device.index()}];
        batch.parameters.push_back(parameter);
        batch.gradients.push_back(matching_gradient(name, parameter));
        batch.indices.push_back(index);
      }
      ++index;
    }
    for (const auto& [key, batch] : batches) {
      update(
          batch, learning_rate_ * group.learning_rate_factor,
          group.weight_decay);
    }
  }
}

void Optimizer::zero_grad(ZeroGrad how) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : parameters()) {
    auto& gradient = parameter.mutable_grad();
    if (!gradient.defined()) {
      continue;
    }
    if (how == ZeroGrad::set_to_none) {
      gradient.reset();
    } else {
      gradient.zero_();
    }
  }
}

std::vector<torch::Tensor> Optimizer::parameters() const {
  std::vector<torch::Tensor> all;
  for (const auto& group : groups_) {
    for (const auto& [name, parameter] : group.parameters) {
      all.push_back(parameter);
    }
  }
  return all;
}

void Optimizer::load_state(const NamedTensors& values) {
  const torch::NoGradGuard no_grad;
  const NamedTensors own = state();
  std::map<std::string, torch::Tensor> given(values.begin(), values.end());
  std::ostringstream problems;
  for (const auto& [name, tensor] : own) {
    const auto found = given.find(name);
    if (found == given.end()) {
      problems << "\n  " << name << ": missing";
    } else if (found->second.sizes() != tensor.sizes()) {
      problems << "\n  " << name << ": shape " << found->second.sizes()
               << ", here " << tensor.sizes();
    }
  }
  std::set<std::string> names;
  for (const auto& [name, tensor] : own) {
    names.insert(name);
  }
  for (const auto& [name, tensor] : given) {
    if (!names.contains(name)) {
      problems << "\n  " << name << ": not part of this optimizer";
    }
  }
  if (const std::string text = problems.str(); !text.empty()) {
    throw CheckpointError(
        "the optimizer's state does not fit; use the model and optimizer that "
        "it was saved from:" +
        text);
  }
  for (const auto& [name, tensor] : own) {
    tensor.copy_(given.at(name));
  }
}

}  // namespace echelon
