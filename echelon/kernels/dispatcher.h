// Operators of LibTorch's dispatcher.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace echelon::kernels {

/// The operator of a name ("echelon::swiglu") and the signature that it was
/// defined with. Keep it in a static: looking it up takes longer than a call.
template <class Signature>
auto operator_named(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .template typed<Signature>();
}

}  // namespace echelon::kernels
