#include "echelon/profiling/operator_scope.h"

#include <torch/library.h>

#include <utility>

namespace echelon::profiling {
namespace {

thread_local OperatorScope* innermost = nullptr;

}  // namespace

struct OperatorDispatch {
  static void enter(
      const c10::OperatorHandle& op, c10::DispatchKeySet keys,
      torch::jit::Stack* stack) {
    OperatorCall(op, keys, *stack, innermost).run();
  }

  static std::vector<at::Tensor> enter_region(
      const std::string& name,
      const std::function<std::vector<at::Tensor>()>& function,
      OperatorScope* scope) {
    if (scope == nullptr) return function();
    return scope->handler_.run_region(
        name, [&] { return enter_region(name, function, scope->outer_); });
  }
};

OperatorCall::OperatorCall(
    const c10::OperatorHandle& op, c10::DispatchKeySet keys,
    torch::jit::Stack& stack, OperatorScope* next)
    : op(op),
      keys(keys),
      stack(stack),
      first_(stack.size() - op.schema().arguments().size()),
      next_(next) {}

void OperatorCall::run() {
  if (next_ == nullptr) {
    run_kernel();
    return;
  }
  OperatorScope* const here = std::exchange(next_, next_->outer_);
  here->handler_.run(*this);
}

void OperatorCall::run_kernel() {
  if (whole) {
    const c10::impl::ExcludeDispatchKeyGuard below(OperatorScope::kKey);
    op.callBoxed(&stack);
    return;
  }
  // Handlers also see the operators that this kernel calls.
  op.redispatchBoxed(
      keys & c10::DispatchKeySet(
                 c10::DispatchKeySet::FULL_AFTER, OperatorScope::kKey),
      &stack);
}

OperatorScope::OperatorScope(OperatorHandler& handler)
    : handler_(handler),
      outer_(std::exchange(innermost, this)),
      include_(kKey) {}

OperatorScope::~OperatorScope() {
  innermost = outer_;
}

std::vector<at::Tensor> as_one_operator(
    const std::string& name,
    const std::function<std::vector<at::Tensor>()>& function) {
  return OperatorDispatch::enter_region(name, function, innermost);
}

}  // namespace echelon::profiling

TORCH_LIBRARY_IMPL(_, Fake, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<
                   &echelon::profiling::OperatorDispatch::enter>());
}
