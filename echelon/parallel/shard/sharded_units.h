// Parameters cut over the ranks of a group: the core of sharded data
// parallelism.
//
//   ShardedUnits units(shard_group, replicate_group, options);
//   for each layer i, as soon as it is built:
//     units.add(layer_name, its parameters);       // cut; the whole is freed
//     layer.forward = units.wrap({i}, layer.forward);
//   an optimizer over units.flat_shards()
//   each step:
//     units.begin_backward({.last = …}) before each backward; loss.backward();
//     units.finish();                               // gradients are in the
//     shards optimizer->step(); units.after_update();
//
// A unit is a set of parameters that are gathered and freed together: a layer.
// Its parameters lie in a flat buffer (one per dtype and requires_grad), those
// with weight decay first; each rank keeps an equal range of it (the last is
// padded), which the optimizer updates by fused calls. Forward and backward see
// the whole parameters, which are views of a gathered buffer, in the compute
// dtype: all-gather before a unit's use, ahead of it by options.prefetch units;
// freed when other units are used (stage 3). A gradient goes to its place in a
// flat gradient as soon as autograd has it; when a unit has all of its
// gradients the flat one is reduce-scattered while backward goes on. Units are
// reduced in one order on all ranks, the last first, whatever order they become
// ready in.
//
// With a shard group of one rank nothing is cut and nothing gathered: master
// parameters, low precision and offload work the same way.
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
#include "echelon/options/shard.h"

namespace echelon {

/// Where a unit's gradients and parameters are while it is not used.
struct ShardedUnitsOptions {
  ShardOptions shard;
  /// shard.gather decided: true keeps gathered parameters until after_update().
  bool gather_once = false;
  /// Of gathered parameters and of their gradients; none: the parameters' own.
  /// Shards stay in the parameters' dtype: they are the master copies.
  std::optional<torch::Dtype> compute;
  /// Gradients are summed over ranks in this dtype; none: as autograd left
  /// them.
  std::optional<torch::Dtype> reduce;
  /// Shards, their gradients and so the optimizer's state are in the host's
  /// memory (pinned where there is a GPU). `offload_shards`: nothing of them
  /// stays on the device, not even in the compute dtype.
  bool offload_optimizer = false;
  bool offload_shards = false;
  /// Parameters that get a flat buffer of their own, so that their range is the
  /// same wherever they live: those tied to parameters of other stages.
  std::set<std::string> apart;
  /// Called with parameters whose gradients are complete on this rank and still
  /// whole (in .grad), before they are reduced: sums over other axes go here.
  std::function<void(const std::vector<std::pair<std::string, torch::Tensor>>&)>
      before_reduce;
};

/// What this rank updates of one parameter.
struct ShardedPart {
  std::string name;
  std::vector<int64_t> shape;  // of the parameter as it was added
  IndexRange range;        // of its elements in row-major order; may be empty
  torch::Tensor value;     // [range.size()], a view of the shard
  torch::Tensor gradient;  // the same of the gradient; undefined if none yet
};

/// What the next backward is.
struct BackwardPass {
  /// Of a step, for these units: their gradients are reduced, in every stage.
  /// Before the last one stage 1 keeps whole gradients; stages 2 and 3 reduce
  /// each time and add up shards.
  bool last = true;
  /// Not even stages 2 and 3 reduce before the last one, as no_sync() of data
  /// parallelism: more memory, less communication.
  bool keep_whole = false;
  /// Whose gradients it computes, such as one pipeline stage's; empty: all.
  std::vector<size_t> units = {};
};

/// Every rank of both groups makes one, adds the same units in the same order
/// and makes the same calls. `replicate`: ranks with the same shard, whose
/// gradients are summed after the reduce-scatter (hybrid sharding); of size 1
/// for none. Gradients are averaged: sums over both groups, divided by the
/// number of ranks. One thread of a rank calls at a time; backward may run on
/// others. The ranks' control flow is the same: they use the same units in the
/// same order.
class ShardedUnits {
 public:
  struct Impl;

  ShardedUnits(Group shard, Group replicate, ShardedUnitsOptions options = {});
  ~ShardedUnits();
  ShardedUnits(const ShardedUnits&) = delete;
  ShardedUnits& operator=(const ShardedUnits&) = delete;

  /// Cuts the parameters: rank 0's values are the first ones unless `equal`,
  /// which says that all ranks have the same. Each tensor stays the object that
  /// modules hold; its memory is freed (stage 3) or becomes a view of the
  /// unit's buffer. One without requires_grad is cut too and never updated.
  /// Returns the unit's index. Throws ConfigError for a parameter that another
  /// unit has, is a view, sparse or not floating point, by name.
  size_t
  add(const std::string& name,
      const std::vector<std::pair<std::string, torch::Tensor>>& parameters,
      bool equal = true);
  size_t size() const;
  /// The index of the unit that has `parameter`, if one has.
  std::optional<size_t> unit_of(const torch::Tensor& parameter) const;

  /// `forward`, with the units' parameters gathered while it runs and when
  /// backward comes to it. A unit may be used by several forwards (a tied
  /// parameter).
  std::function<std::vector<torch::Tensor>(const std::vector<torch::Tensor>&)>
  wrap(
      std::vector<size_t> units, std::function<std::vector<torch::Tensor>(
                                     const std::vector<torch::Tensor>&)>
                                     forward);

  /// While it lives the units' parameters are gathered; values that are written
  /// to them are lost. All of them when `units` is empty.
  class Gathered {
   public:
    ~Gathered();
    Gathered(const Gathered&) = delete;
    Gathered& operator=(const Gathered&) = delete;

   private:
    friend class ShardedUnits;
    Gathered(std::shared_ptr<Impl> impl, std::vector<size_t> units);
    std::shared_ptr<Impl> impl_;
    std::vector<size_t> units_;
  };
  std::unique_ptr<Gathered> gather(std::vector<size_t> units = {});

  /// Before each backward of a step that has several (one alone needs no call).
  void begin_backward(const BackwardPass& pass);
  /// After the last backward of a step: reduces what is left, and waits. Unused
  /// parameters count as zeros where another rank, or another parameter of the
  /// unit, has a gradient; a unit that nobody used has none. (Asked in the
  /// first step, and in each one if some rank did not use all units then.)
  /// Throws CommError, naming the unit.
  void finish();
  /// After the shards were updated: whole parameters that are kept are gathered
  /// anew (stages 1 and 2: while the next forward begins), others forgotten.
  /// Gradients are dropped. `updated`: false for a step that is skipped:
  /// nothing else happens.
  void after_update(bool updated = true);
  /// Before values are written into parts(): returns when no gather of this
  /// rank is under way, which reads them, and in stages 1 and 2 writes beside
  /// them.
  void before_load();
  /// As after_update, after values were written into parts(), those of frozen
  /// parameters too.
  void after_load();

  /// Flat shards for the optimizer, by unit, in two kinds: those that weight
  /// decay applies to (of parameters of two and more dimensions), and the
  /// others. What has no element on this rank is left out. Their .grad is set
  /// by finish().
  struct FlatShard {
    std::string name;  // "transformer.h.0/decay"
    bool decays = false;
    torch::Tensor tensor;
  };
  std::vector<FlatShard> flat_shards() const;
  /// By parameter: every one that was added, in that order.
  std::vector<ShardedPart> parts() const;

  /// Bytes, for the plan of memory. On a rank are
  ///   shards     all of them, and as many of gradients from the first backward
  ///   on gathered   units in use and those ahead of them; all with stages 1
  ///   and 2 gradients  flat ones of two units: one is filled, one is reduced;
  ///   all when
  ///              a backward that is not the last leaves them whole
  struct UnitBytes {
    std::string name;
    int64_t shard = 0;     // master copies that are here
    int64_t gathered = 0;  // whole, in the compute dtype
    int64_t gradient = 0;  // flat
  };
  std::vector<UnitBytes> bytes() const;

  /// For the other files of this room.
  const std::shared_ptr<Impl>& impl() const { return impl_; }

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace echelon
