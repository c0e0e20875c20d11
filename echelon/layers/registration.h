// How the modules of layers are registered under the names of their list, and
// how two modules share a parameter.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <memory>
#include <optional>
#include <string>

namespace echelon {

/// Registers `module` under a dotted name: "layer1.0" is the child "0" of the
/// child "layer1" of `root`, which is created when it does not exist.
void register_under(
    torch::nn::Module& root, const std::string& name,
    std::shared_ptr<torch::nn::Module> module);

/// Removes the parameter `name` ("layer1.0.weight") of `root` from the list of
/// parameters. The module that holds it keeps it, but parameters(), to() and a
/// state dict skip it. Does nothing when it is not listed.
void unlist_parameter(torch::nn::Module& root, const std::string& name);

/// Removes all registrations but the first of a module or a parameter that is
/// registered in several places. Keeps order.
void list_each_parameter_once(torch::nn::Module& root);

/// A tensor that a module holds in place of another module's parameter. Its
/// gradients flow into the other's `grad`, so that autograd, its hooks and
/// optimizers see one parameter with two uses. It has the same memory, or is a
/// copy on another device.
class SharedParameter {
 public:
  /// `device`: where `use` is needed; none: where the parameter is.
  SharedParameter(
      torch::Tensor parameter, torch::Tensor use,
      std::optional<torch::Device> device = std::nullopt);

  /// Follows the parameter after to(), sharding or requires_grad changed it,
  /// and copies its values to another device. Call before each use; in the same
  /// memory it costs nothing when nothing changed.
  void refresh() const;

 private:
  torch::Tensor parameter_;
  torch::Tensor use_;
  std::optional<torch::Device> device_;
};

/// `tensor` on `device`. Blocks for copies to the CPU: nothing else would wait
/// for the values there.
torch::Tensor moved(const torch::Tensor& tensor, torch::Device device);

}  // namespace echelon
