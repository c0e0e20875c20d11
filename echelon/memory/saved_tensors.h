// What autograd keeps for backward, given into other hands: recompute, offload and
// low-precision activations stand on this, and the gathering of sharded
// parameters. As torch.autograd.graph.saved_tensors_hooks does.
#pragma once

#include <torch/types.h>

#include <functional>
#include <memory>

namespace echelon {

/// Sees each tensor that an operator of this thread saves. Thread-safe on the
/// unpacking side: backward may run on other threads.
class SavedTensorHooks {
 public:
  virtual ~SavedTensorHooks() = default;

  /// What gives `tensor` back when backward asks, at most once unless the graph is
  /// retained; destroyed with the graph's node. Null: not mine, so the next outer
  /// hooks are asked, and at last autograd keeps it as ever.
  ///
  ///   tensor  without history; a view shares its base's storage
  virtual std::function<torch::Tensor()> pack(const torch::Tensor& tensor) = 0;
};

/// While it lives, `hooks` are this thread's innermost. Scopes nest as blocks do.
/// Null `hooks`: autograd keeps tensors as ever, whatever is outside.
class SavedTensorScope {
 public:
  explicit SavedTensorScope(std::shared_ptr<SavedTensorHooks> hooks);
  ~SavedTensorScope();
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;
};

}  // namespace echelon
