// Builds and runs layers without memory, on the meta device, which knows only
// shapes and dtypes.
//
// MetaMode sees the operators of its thread (profiling/operator_scope.h). It
// makes factories return meta tensors, whatever device they are asked for, so
// that an unmodified module is built without memory, and an observer sees each
// operator that runs.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "echelon/layers/layer_list.h"
#include "echelon/profiling/operator_scope.h"

namespace echelon::counting {

/// Builds the layer on the meta device: parameters and buffers have shapes and
/// dtypes, but no memory and no values. A tensor that already exists and that
/// the definition captured stays as it is, so layers share storage here exactly
/// if they do when they are built on a real device.
///
/// Thread-safe, without effect on other threads. Throws ConfigError that names
/// the layer and the operator when it cannot be built without data.
BuiltLayer build_on_meta(const LayerDefinition& layer);

namespace detail {

/// Sees operators of the thread that a MetaMode is on.
class OperatorObserver {
 public:
  virtual ~OperatorObserver() = default;
  /// Whether operators that `op` calls are hidden, because `ran` counts them.
  virtual bool counts_whole(const std::string& op) const = 0;
  virtual void
  ran(const std::string& op,  // "aten::mm"
      const std::vector<c10::IValue>& arguments,
      at::ArrayRef<c10::IValue> results) = 0;
};

/// Active while it lives, on this thread and in backward passes that the thread
/// starts on the meta device. Modes nest; the innermost is active.
class MetaMode : private profiling::OperatorHandler {
 public:
  /// Without an observer, for building: existing tensors stay real. With one,
  /// for computing: operators get meta tensors in place of real ones.
  explicit MetaMode(OperatorObserver* observer = nullptr);
  ~MetaMode();
  MetaMode(const MetaMode&) = delete;
  MetaMode& operator=(const MetaMode&) = delete;

  /// The innermost operator that has thrown since construction, or "".
  const std::string& failed() const { return failed_; }

  /// The meta tensor that operators get in place of `real`. The stand-ins of
  /// tensors that share storage share it too.
  at::Tensor stand_in(const at::Tensor& real);
  /// Whether `storage` belongs to a stand-in.
  bool stands_in(const c10::StorageImpl* storage) const;

 private:
  void run(profiling::OperatorCall& call) override;
  void replace_real(c10::IValue& value);

  OperatorObserver* observer_;
  std::string failed_;
  std::unordered_map<const c10::StorageImpl*, c10::Storage> stand_ins_;
  std::unordered_set<const c10::StorageImpl*> meta_storages_;
  profiling::OperatorScope scope_;
};

/// The cause of an `error` under `mode`, and the way out, to follow "layer x:
/// ".
std::string meta_failure(const MetaMode& mode, const std::exception& error);

/// Makes the linker include the object file of meta_kernels.cpp.
void need_meta_kernels();

}  // namespace detail
}  // namespace echelon::counting
