// A parameter that a slice uses and another one owns, perhaps on another
// device.
#pragma once

#include <torch/types.h>

namespace echelon::placement {

/// The tensor that a module holds in place of the owner's parameter: its values
/// on the module's device, with gradients that flow into the owner's.
class TiedCopy {
 public:
  TiedCopy(torch::Tensor owner, torch::Tensor use, torch::Device device);

  /// Call before each forward pass of the module. A copy between devices; none
  /// on one device, where both are the same memory.
  void refresh() const;

 private:
  torch::Tensor owner_;
  torch::Tensor use_;
  torch::Device device_;
};

}  // namespace echelon::placement
