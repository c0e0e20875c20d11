// The operators that a thread runs, seen below autograd by whoever asks.
//
// LibTorch lets a kernel stand in front of all operators of a thread, after
// autograd and autocast (a boxed fallback of DispatchKey::Fake). There is one
// for the process, and this is it; those who count operators and those who keep
// or replace their results have a handler each, and see each other's.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <functional>
#include <string>
#include <vector>

namespace echelon {

class OperatorScope;

/// One operator that is to run.
class OperatorCall {
 public:
  const c10::OperatorHandle& op;
  c10::DispatchKeySet keys;
  /// Ends with the operator's arguments; with its results when it has run.
  torch::jit::Stack& stack;
  /// What the operator calls inside is hidden from all handlers.
  bool whole = false;

  /// "aten::mm".
  const std::string& name() const { return op.operator_name().name; }
  /// Where its arguments begin; and its results, which take their place.
  size_t first() const { return first_; }

  /// Lets the next outer handler run it; at last its kernel runs.
  void run();
  /// Runs its kernel: outer handlers see neither it nor what it calls.
  void run_kernel();

 private:
  friend struct OperatorDoor;
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

  /// Instead of each operator; calls call.run(), or leaves results on the
  /// stack. What it computes itself comes here as well, unless it excludes
  /// kKey.
  virtual void run(OperatorCall& call) = 0;
  /// Instead of what as_one_operator was given.
  virtual Results
  run_region(const std::string& name, const std::function<Results()>& next) {
    return next();
  }
};

/// From construction to destruction, on this thread, `handler` is the
/// innermost. Backward passes that are started meanwhile and run on this thread
/// come to it.
class OperatorScope {
 public:
  static constexpr c10::DispatchKey kKey = c10::DispatchKey::Fake;

  explicit OperatorScope(OperatorHandler& handler);
  ~OperatorScope();
  OperatorScope(const OperatorScope&) = delete;
  OperatorScope& operator=(const OperatorScope&) = delete;

 private:
  friend class OperatorCall;
  friend struct OperatorDoor;
  OperatorHandler& handler_;
  OperatorScope* outer_;
  c10::impl::IncludeDispatchKeyGuard include_;
};

/// function(), which handlers may treat as one operator called `name`: in the
/// forward of an autograd function that computes several, or communicates.
///
///   function  returns new tensors that nobody else holds
std::vector<at::Tensor> as_one_operator(
    const std::string& name,
    const std::function<std::vector<at::Tensor>()>& function);

}  // namespace echelon
