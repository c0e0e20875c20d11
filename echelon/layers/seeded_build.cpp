#include "echelon/layers/seeded_build.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <utility>

namespace echelon {
namespace {

// A dispatch key without other use, above all others. The fallback is called
// only in threads that include the key.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

thread_local at::Generator* current = nullptr;

bool is_generator(const c10::Argument& argument) {
  const auto& type = *argument.type();
  if (type.kind() == c10::TypeKind::GeneratorType) return true;
  return type.kind() == c10::TypeKind::OptionalType &&
         type.expectRef<c10::OptionalType>().getElementType()->kind() ==
             c10::TypeKind::GeneratorType;
}

// An operator that makes a new tensor calls one that fills it, which comes
// through here again.
void with_current_generator(
    const c10::OperatorHandle& op, c10::DispatchKeySet keys,
    torch::jit::Stack* stack) {
  if (current != nullptr && keys.has_backend(c10::BackendComponent::CPUBit)) {
    const auto& arguments = op.schema().arguments();
    const size_t first = stack->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
      auto& value = (*stack)[first + i];
      if (value.isNone() && is_generator(arguments[i])) value = *current;
    }
  }
  op.redispatchBoxed(
      keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, library) {
  library.fallback(
      torch::CppFunction::makeFromBoxedFunction<&with_current_generator>());
}

}  // namespace

SeededBuild::SeededBuild(uint64_t seed, std::string_view layer)
    : generator_(at::detail::createCPUGenerator(
          XXH3_64bits_withSeed(layer.data(), layer.size(), seed))),
      outer_(std::exchange(current, &generator_)),
      include_(kKey) {}

SeededBuild::~SeededBuild() {
  current = outer_;
}

}  // namespace echelon
