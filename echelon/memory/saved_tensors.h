// What autograd keeps for backward, given into other hands: recompute, offload
// and low-precision activations stand on this, and the gathering of sharded
// parameters. As torch.autograd.graph.saved_tensors_hooks does.
//
// A program that uses this has an autograd engine of ours, which asks the hooks
// of the thread that saves; it is set while the program starts. What operators
// and torch::autograd::Function::save_for_backward keep passes through it.
// Tensors that a Function puts into saved_data do not.
#pragma once

#include <torch/types.h>

#include <functional>
#include <memory>
#include <vector>

namespace echelon {

/// Sees each tensor that an operator of this thread saves. Thread-safe on the
/// unpacking side: backward may run on other threads.
class SavedTensorHooks {
 public:
  virtual ~SavedTensorHooks() = default;

  /// What gives `tensor` back when backward asks, at most once unless the graph
  /// is retained; destroyed with the graph's node. Null: not mine, so the next
  /// outer hooks are asked, and at last autograd keeps it as ever.
  ///
  ///   tensor  without history; a view shares its base's storage
  ///
  /// Gradients are off meanwhile. Whoever takes it, backward throws, as ever,
  /// when the tensor was changed in place after it was saved.
  virtual std::function<torch::Tensor()> pack(const torch::Tensor& tensor) = 0;

  /// Whether `tensor` comes here before inner hooks are asked: parameters whose
  /// memory comes and goes, which nobody else may hold. pack() must take it.
  virtual bool owns(const torch::Tensor& tensor) const { return false; }
};

/// While it lives, `hooks` are this thread's innermost. Scopes nest as blocks
/// do. Null `hooks`: autograd keeps tensors as ever, whatever is outside.
class SavedTensorScope {
 public:
  explicit SavedTensorScope(std::shared_ptr<SavedTensorHooks> hooks);
  ~SavedTensorScope();
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;
};

/// The hooks of this thread at one moment, for another moment or another
/// thread.
class SavedTensorState {
 public:
  SavedTensorState();

  /// While it lives, they are this thread's.
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

/// Saves `tensor` as an operator of this thread would, through the hooks: what
/// gives it back, without history. Throws when it was changed in place since.
std::function<torch::Tensor()> save_tensor(const torch::Tensor& tensor);

}  // namespace echelon
