// Parameters that two modules share.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <string>

namespace echelon {

/// A tensor that a module holds in place of another module's parameter. It has
/// the same memory, and its gradients flow into the other's `grad`, so that
/// autograd, its hooks and optimizers see one parameter with two uses.
class SharedParameter {
 public:
  SharedParameter(torch::Tensor parameter, torch::Tensor use);

  /// Follows the parameter after to(), sharding or requires_grad changed it.
  /// Call before each use; costs nothing when nothing changed.
  void refresh() const;

 private:
  torch::Tensor parameter_;
  torch::Tensor use_;
};

/// Removes the parameter `name` ("layer1.0.weight") of `root` from the list of
/// parameters. The module that holds it keeps it, but parameters(), to() and a
/// state dict skip it. Does nothing when it is not listed.
void unlist_parameter(torch::nn::Module& root, const std::string& name);

/// Removes all registrations but the first of a module or a parameter that is
/// registered in several places. Keeps order.
void list_each_parameter_once(torch::nn::Module& root);

}  // namespace echelon
