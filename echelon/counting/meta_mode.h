// Layers and their computations without memory: on the meta device, which knows
// shapes and dtypes alone.
//
// MetaMode sees the operators of its thread (operators/operator_scope.h):
// factories then make meta tensors whatever device they are asked for, so an
// unmodified module is built without memory, and an observer sees each operator
// that runs.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "echelon/layers/layer_list.h"
#include "echelon/profiling/operator_scope.h"

namespace echelon {

/// The layer as its definition builds it, on the meta device: parameters and
/// buffers have shapes and dtypes, but no memory and no values. A tensor that
/// the definition shares with others and that exists already stays what it is,
/// so layers that share storage here share it when they are built in earnest.
///
/// Thread-safe; other threads are not disturbed. Throws ConfigError that names
/// the layer and the operator when it cannot be built without data.
BuiltLayer build_on_meta(const LayerDefinition& layer);

namespace detail {

/// Sees operators of the thread that a MetaMode is on.
class OperatorObserver {
 public:
  virtual ~OperatorObserver() = default;
  /// Whether what `op` calls inside shall be hidden, since `ran` counts it.
  virtual bool counts_whole(const std::string& op) const = 0;
  virtual void
  ran(const std::string& op,  // "aten::mm"
      const std::vector<c10::IValue>& arguments,
      at::ArrayRef<c10::IValue> results) = 0;
};

/// On from construction to destruction, on this thread, and in backward passes
/// that it starts on the meta device. Modes nest; the inner one counts.
class MetaMode : private OperatorHandler {
 public:
  /// Without an observer: building, where tensors that exist stay real. With
  /// one: computing, where operators get meta tensors in place of real ones.
  explicit MetaMode(OperatorObserver* observer = nullptr);
  ~MetaMode();
  MetaMode(const MetaMode&) = delete;
  MetaMode& operator=(const MetaMode&) = delete;

  /// The innermost operator that has thrown since construction, or "".
  const std::string& failed() const { return failed_; }

  /// The meta tensor that operators get in place of `real`. Tensors that share
  /// storage keep doing so.
  at::Tensor stand_in(const at::Tensor& real);
  /// Whether `storage` is that of a stand_in.
  bool stands_in(const c10::StorageImpl* storage) const;

 private:
  void run(OperatorCall& call) override;
  void replace_real(c10::IValue& value);

  OperatorObserver* observer_;
  std::string failed_;
  std::unordered_map<const c10::StorageImpl*, c10::Storage> stand_ins_;
  std::unordered_set<const c10::StorageImpl*> meta_storages_;
  OperatorScope scope_;
};

/// Why `error` was thrown under `mode`, with the way out: for "layer x: " + it.
std::string meta_failure(const MetaMode& mode, const std::exception& error);

/// Names the object file of the kernels that the meta device lacks in C++, so
/// that the linker takes it.
void need_meta_kernels();

}  // namespace detail
}  // namespace echelon
