// Hooks for the tensors that autograd keeps for backward, as in
// torch.autograd.graph.saved_tensors_hooks. Recompute, offload, low-precision
// activations and the unsharding of parameters are built on them.
//
// A program that uses this has an autograd engine of ours, which asks the hooks
// of the thread that saves; it is set while the program starts. Hooks see what
// operators and torch::autograd::Function::save_for_backward keep. They do not
// see tensors that a Function puts into saved_data.
#pragma once

#include <torch/types.h>

#include <functional>
#include <memory>
#include <vector>

namespace echelon {

/// Sees each tensor that an operator of this thread saves. Unpacking must be
/// thread-safe: backward may run on other threads.
class SavedTensorHooks {
 public:
  virtual ~SavedTensorHooks() = default;

  /// Returns a function that gives `tensor` back when backward asks, which it
  /// does at most once unless the graph is retained; the function is destroyed
  /// with the graph's node. Null: these hooks do not take it, so the next outer
  /// hooks are asked, and finally autograd keeps it as usual.
  ///
  ///   tensor  without history; a view shares its base's storage
  ///
  /// Gradients are off during the call. Whoever takes the tensor, backward
  /// throws, as usual, when it was changed in place after it was saved.
  virtual std::function<torch::Tensor()> pack(const torch::Tensor& tensor) = 0;

  /// Whether `tensor` comes to these hooks before inner hooks are asked. For
  /// parameters whose memory is released and unsharded again, so that nobody
  /// else may hold it. pack() must take it.
  virtual bool owns(const torch::Tensor& tensor) const { return false; }
};

/// While it lives, `hooks` are this thread's innermost. Scopes nest as blocks
/// do. Null `hooks`: autograd keeps tensors as usual, whatever is outside.
class SavedTensorScope {
 public:
  explicit SavedTensorScope(std::shared_ptr<SavedTensorHooks> hooks);
  ~SavedTensorScope();
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;
};

/// A snapshot of this thread's hooks, to be set later or on another thread.
class SavedTensorState {
 public:
  SavedTensorState();

  /// While it lives, they are this thread's hooks.
  class Scope {
   public:
    explicit Scope(const SavedTensorState& state);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    std::vector<std::shared_ptr<SavedTensorHooks>> before_;
  };

 private:
  std::vector<std::shared_ptr<SavedTensorHooks>> hooks_;
};

/// Saves `tensor` through the hooks as an operator of this thread would.
/// Returns a function that gives it back, without history, and that throws when
/// the tensor was changed in place since.
std::function<torch::Tensor()> save_tensor(const torch::Tensor& tensor);

}  // namespace echelon
