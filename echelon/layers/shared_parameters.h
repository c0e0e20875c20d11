// Making parameters of two modules one, whatever the modules are.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <string>

namespace echelon {

/// A tensor that a module holds in place of another one's parameter: the same
/// memory, and gradients that flow into the other's `grad`, so that autograd,
/// its hooks and optimizers see one parameter with two uses.
class SharedParameter {
 public:
  SharedParameter(torch::Tensor parameter, torch::Tensor use);

  /// Follows the parameter where to(), a sharding or requires_grad took it.
  /// Call before each use; costs nothing when nothing happened.
  void refresh() const;

 private:
  torch::Tensor parameter_;
  torch::Tensor use_;
};

/// No longer lists the parameter `name` ("layer1.0.weight") of `root`: it stays
/// what it is to the module that holds it, but parameters(), to() and a state
/// dict pass it over. Nothing when it is not listed.
void unlist_parameter(torch::nn::Module& root, const std::string& name);

/// Unlists all but the first of a module, or of a parameter, that is registered
/// in several places. Keeps order.
void list_each_parameter_once(torch::nn::Module& root);

}  // namespace echelon
