#include "echelon/parallel/placement/tied_copy.h"

#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace echelon::placement {

namespace impl = torch::autograd::impl;

TiedCopy::TiedCopy(torch::Tensor owner, torch::Tensor use, torch::Device device)
    : owner_(std::move(owner)), use_(std::move(use)), device_(device) {
  use_.set_requires_grad(false);
  refresh();
}

void TiedCopy::refresh() const {
  const auto values = owner_.to(
      device_, owner_.scalar_type(), /*non_blocking=*/!device_.is_cpu());
  use_.set_data(values.detach());
  impl::set_gradient_edge(
      use_, values.requires_grad() ? impl::gradient_edge(values)
                                   : torch::autograd::Edge());
}

}  // namespace echelon::placement
