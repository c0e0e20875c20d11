// Handlers for the operators that a thread runs, below autograd.
//
// LibTorch lets one kernel per process intercept all operators of a thread,
// after autograd and autocast (a boxed fallback of DispatchKey::Fake). This
// file registers it and calls handlers: one that counts operators, say, and one
// that keeps or replaces their results. Handlers nest and see each other's
// operators.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <functional>
#include <string>
#include <vector>

namespace echelon::profiling {

class OperatorScope;

/// One operator that is about to run.
class OperatorCall {
 public:
  const c10::OperatorHandle& op;
  c10::DispatchKeySet keys;
  /// Ends with the operator's arguments; after run(), with its results.
  torch::jit::Stack& stack;
  /// True hides the operators that this one calls inside from all handlers.
  bool whole = false;

  /// "aten::mm".
  const std::string& name() const { return op.operator_name().name; }
  /// The stack index of the first argument; results take the arguments' place.
  size_t first() const { return first_; }

  /// Passes it to the next outer handler, or after the outermost to its kernel.
  void run();
  /// Runs its kernel: outer handlers see neither it nor the operators it calls.
  void run_kernel();

 private:
  friend struct OperatorDispatch;
  OperatorCall(
      const c10::OperatorHandle& op, c10::DispatchKeySet keys,
      torch::jit::Stack& stack, OperatorScope* next);

  size_t first_;
  OperatorScope* next_;
};

class OperatorHandler {
 public:
  using Results = std::vector<at::Tensor>;
  virtual ~OperatorHandler() = default;

  /// Called instead of each operator; calls call.run(), or leaves results on
  /// the stack. Operators that the handler itself runs come here as well,
  /// unless it excludes kKey.
  virtual void run(OperatorCall& call) = 0;
  /// Called instead of the function that as_one_operator was given.
  virtual Results
  run_region(const std::string& name, const std::function<Results()>& next) {
    return next();
  }
};

/// While a scope lives, `handler` is the innermost handler of this thread. It
/// also sees backward passes that start meanwhile and run on this thread.
class OperatorScope {
 public:
  static constexpr c10::DispatchKey kKey = c10::DispatchKey::Fake;

  explicit OperatorScope(OperatorHandler& handler);
  ~OperatorScope();
  OperatorScope(const OperatorScope&) = delete;
  OperatorScope& operator=(const OperatorScope&) = delete;

 private:
  friend class OperatorCall;
  friend struct OperatorDispatch;
  OperatorHandler& handler_;
  OperatorScope* outer_;
  c10::impl::IncludeDispatchKeyGuard include_;
};

/// Calls `function`, which handlers may treat as one operator called `name`.
/// Used in the forward of an autograd function that runs several operators, or
/// communicates. `function` returns new tensors that nobody else holds.
std::vector<at::Tensor> as_one_operator(
    const std::string& name,
    const std::function<std::vector<at::Tensor>()>& function);

}  // namespace echelon::profiling
