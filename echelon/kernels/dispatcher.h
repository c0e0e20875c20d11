// Operators of LibTorch's dispatcher.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/types.h>

#include <optional>

namespace echelon::kernels {

/// The operator of a name ("echelon::swiglu") and the signature that it was
/// defined with. Keep it in a static: looking it up takes longer than a call.
template <class Signature>
auto operator_named(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .template typed<Signature>();
}

/// As an operator takes what may be left out.
inline std::optional<torch::Tensor> if_defined(const torch::Tensor& x) {
  return x.defined() ? std::optional(x) : std::nullopt;
}

}  // namespace echelon::kernels
