// Parameters sharded over the ranks of a group: the core of sharded data
// parallelism (ZeRO, FSDP). For a torch::nn::Module use fully_sharded.h.
//
//   ShardedUnits units(shard_group, replicate_group, options);
//   for each layer i, as soon as it is built:
//     units.add(layer_name, its_parameters);      // sharded; the rest is freed
//     layer.forward = units.wrap({i}, layer.forward);
//   auto optimizer = make_optimizer(options, units.parameter_groups(0.01));
//   each step:
//     units.begin_backward({.last = …});          // before each backward
//     loss.backward();
//     units.finish();                             // shards have gradients
//     optimizer->step();
//     units.after_update();
//
// A unit is a set of parameters that are unsharded and resharded together, such
// as those of a layer. They are stored in flat buffers (one per dtype and
// requires_grad), parameters with weight decay first. Each rank keeps an equal
// shard of a buffer (the last one is padded), which the optimizer updates by
// fused calls.
//
// Forward and backward see full parameters, which are views of an unsharded
// buffer in the compute dtype. A unit is all-gathered before it is used, up to
// options.prefetch units ahead, and resharded when other units are used (stage
// 3). A layer writes its gradient into a flat gradient, or it is copied there
// as soon as autograd has it. A hook that keeps a gradient has to clone it.
// When all gradients of a unit have arrived, the flat gradient is
// reduce-scattered while backward continues. All ranks reduce the units in one
// order, the last unit first, in whatever order they become ready.
//
// With a shard group of one rank nothing is sharded; master parameters, low
// precision and offload work the same way.
//
// Sources: Rajbhandari et al., "ZeRO", 2020, arXiv:1910.02054; Zhao et al.,
// "PyTorch FSDP", 2023, arXiv:2304.11277.
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "echelon/comm/group.h"
#include "echelon/layout/shard.h"
#include "echelon/optim/optimizer.h"
#include "echelon/options/shard.h"

namespace echelon {

struct ShardedUnitsOptions {
  /// Stage and prefetch; `unshard_once` replaces shard.gather.
  ShardOptions shard;
  /// Keep parameters unsharded from their first use until after_update().
  bool unshard_once = false;
  /// Dtype of unsharded parameters and of their gradients; none: the
  /// parameters' own. Shards keep the parameters' dtype: they are the master
  /// copies.
  std::optional<torch::Dtype> compute;
  /// Dtype in which gradients are summed over ranks; none: autograd's.
  std::optional<torch::Dtype> reduce;
  /// Keep shards, their gradients and with them the optimizer's state in host
  /// memory (pinned where there is a GPU). With `offload_shards` the device
  /// does not even keep a copy of the shards in the compute dtype.
  bool offload_optimizer = false;
  bool offload_shards = false;
  /// Names of parameters that get a flat buffer of their own, so that every
  /// rank that holds one has the same range of it: parameters tied to another
  /// stage's.
  std::set<std::string> own_buffer;
  /// Names of matrices that get rows of zeros behind them in the buffer, up to
  /// a multiple of kPaddedRows (layers/parameter_owner.h): those with a row
  /// for each id of a vocabulary. What is saved and updated stays the matrix.
  std::set<std::string> padded;
  /// Parameters that ranks share out otherwise: experts, of which the ranks of
  /// the constructor's groups have different ones. They are sharded over
  /// `shard` and summed over `replicate`, by the same stage. Null: none.
  struct Apart {
    std::function<bool(const std::string& parameter)> has;
    Group shard;
    Group replicate;
  };
  std::shared_ptr<const Apart> apart;
  /// Called with the parameters of a unit once their gradients (in .grad) are
  /// complete on this rank, before they are reduced: the place for sums over
  /// other axes.
  std::function<void(const std::vector<std::pair<std::string, torch::Tensor>>&)>
      before_reduce;
};

/// This rank's range of one parameter.
struct ShardedPart {
  std::string name;
  std::vector<int64_t> shape;  // of the parameter as it was added
  IndexRange range;        // of its elements in row-major order; may be empty
  torch::Tensor value;     // [range.size()], a view of the shard
  torch::Tensor gradient;  // the same of the gradient; undefined if none yet
};

/// Describes the next backward.
struct BackwardPass {
  /// It is the step's last backward of these units: their gradients are
  /// reduced, in every stage. Before the last one, stage 1 keeps unsharded
  /// gradients; stages 2 and 3 reduce each time and add up in the shards.
  bool last = true;
  /// Stages 2 and 3 do not reduce before the last backward either, as with
  /// no_sync() of data parallelism: more memory, less communication.
  bool keep_unsharded = false;
  /// The units whose gradients it computes, for example one pipeline stage's;
  /// empty: all.
  std::vector<size_t> units = {};
};

/// Every rank of both groups constructs one, adds the same units in the same
/// order, makes the same calls and uses the units in the same order.
///
/// `replicate` has the ranks with the same shard, whose gradients are summed
/// after the reduce-scatter (hybrid sharding); use a group of size 1 for none.
/// Gradients are averaged: summed over both groups, and divided by the number
/// of ranks. One thread of a rank makes calls at a time; backward may run on
/// others.
class ShardedUnits {
 public:
  struct Impl;

  ShardedUnits(Group shard, Group replicate, ShardedUnitsOptions options = {});
  ~ShardedUnits();
  ShardedUnits(const ShardedUnits&) = delete;
  ShardedUnits& operator=(const ShardedUnits&) = delete;

  /// Shards the parameters as one unit and returns its index. They begin with
  /// rank 0's values, unless `equal` says that all ranks have the same. Each
  /// tensor stays the object that modules hold; its memory is freed (stage 3)
  /// or becomes a view of the unit's buffer. A parameter without requires_grad
  /// is sharded too and never updated. Throws ConfigError, by name, for a
  /// parameter that another unit has, is a view, is sparse or is not
  /// floating-point.
  size_t
  add(const std::string& name,
      const std::vector<std::pair<std::string, torch::Tensor>>& parameters,
      bool equal = true);
  size_t size() const;
  /// The index of the unit that has `parameter`, if there is one.
  std::optional<size_t> unit_of(const torch::Tensor& parameter) const;
  /// Call before the first backward for a parameter that several layers use:
  /// autograd sums their gradients, and the sum is stored. Without this call
  /// the result is the same, but takes memory for one gradient more.
  void share(const torch::Tensor& parameter);

  /// `forward`, with the units unsharded while it runs and when backward
  /// reaches it. Several forwards may use one unit (a tied parameter).
  using Forward = std::function<std::vector<torch::Tensor>(
      const std::vector<torch::Tensor>&)>;
  Forward wrap(std::vector<size_t> units, Forward forward);

  /// Unshards these units, or all when `units` is empty. They stay so while the
  /// result lives. Values written to their parameters are lost.
  [[nodiscard]] std::shared_ptr<void> unshard(std::vector<size_t> units = {});

  /// Call before each backward of a step that has several.
  void begin_backward(const BackwardPass& pass);
  /// Call after the last backward of a step: reduces what is left, and waits.
  /// An unused parameter counts as zeros where another rank, or another
  /// parameter of its unit, has a gradient; a unit that no rank used gets none.
  /// (Ranks agree on that in the first step, and in every step if some rank did
  /// not use all units then.) Throws CommError, naming the unit.
  void finish();
  /// Call after the optimizer updated the shards. Drops the gradients.
  /// Parameters that stay unsharded are all-gathered again (in stages 1 and 2
  /// while the next forward begins), others are resharded. Pass `updated` false
  /// when the step was skipped: then only the gradients are dropped.
  void after_update(bool updated = true);
  /// Call before writing values into parts(). Waits for all-gathers of this
  /// rank, which read them, and in stages 1 and 2 write next to them.
  void before_load();
  /// Call after writing values into parts(): as after_update, also for frozen
  /// parameters.
  void after_load();

  /// A flat shard that the optimizer updates. finish() sets its .grad.
  struct FlatShard {
    std::string name;     // "transformer.h.0/decay"
    bool decays = false;  // from parameters of two and more dimensions
    torch::Tensor tensor;
  };
  /// The trainable flat shards of this rank that have elements, by unit.
  std::vector<FlatShard> flat_shards() const;
  /// flat_shards() in two groups for make_optimizer: those that decay get
  /// `weight_decay`, the others none.
  std::vector<ParameterGroup> parameter_groups(double weight_decay) const;
  /// This rank's range of every parameter, in the order in which they were
  /// added.
  std::vector<ShardedPart> parts() const;

  /// Bytes of one unit, for memory planning. A rank holds
  ///
  ///   shards     of all units, and the same again for gradients from the first
  ///              backward on
  ///   unsharded  units in use and those prefetched; all in stages 1 and 2
  ///   gradients  unsharded ones of two units (one is filled, one is reduced);
  ///              all when a backward that is not the last leaves them so
  struct UnitBytes {
    std::string name;
    int64_t shard = 0;      // master copies on this rank
    int64_t unsharded = 0;  // in the compute dtype
    int64_t gradient = 0;   // unsharded
  };
  std::vector<UnitBytes> bytes() const;

  /// For the other files of this room.
  const std::shared_ptr<Impl>& impl() const { return impl_; }

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace echelon
