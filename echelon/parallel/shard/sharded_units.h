// Parameters cut over the ranks of a group: the core of sharded data parallelism.
//
//   ShardedUnits units(shard_group, replicate_group, options);
//   for each layer i, as soon as it is built:
//     units.add(layer_name, its parameters);       // cut; the whole is freed
//     layer.forward = units.wrap({i}, layer.forward);
//   auto optimizer = make_optimizer(options, units.optimizer_groups(decay));
//   each step:
//     units.begin_backward(last) before each backward; loss.backward();
//     units.finish();                               // gradients are in the shards
//     optimizer->step(); units.after_update();
//
// A unit is a set of parameters that are gathered and freed together: a layer. Its
// parameters lie in flat buffers, one per dtype, weight decay and requires_grad;
// each rank keeps an equal range of each (the last is padded), which the optimizer
// updates by one fused call. Forward and backward see the whole parameters, which
// are views of a gathered buffer, in the compute dtype: all-gather before a unit's
// use, ahead of it by options.prefetch units; freed after (stage 3). A gradient
// goes to its place in a flat gradient as soon as autograd has it; when a unit has
// all of its gradients the flat one is reduce-scattered while backward goes on.
// Units are reduced in one order on all ranks, whatever order they become ready in.
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
#include "echelon/parallel/shard/options.h"

namespace echelon {

/// Where a unit's gradients and parameters are while it is not used.
struct ShardedUnitsOptions {
  ShardOptions shard;
  /// shard.gather decided: true keeps gathered parameters until after_update().
  bool gather_once = false;
  /// Of gathered parameters and of their gradients; none: the parameters' own.
  /// Shards stay in the parameters' dtype: they are the master copies.
  std::optional<torch::Dtype> compute;
  /// Gradients are summed over ranks in this dtype; none: as autograd left them.
  std::optional<torch::Dtype> reduce;
  /// Shards, their gradients and so the optimizer's state are in the host's memory
  /// (pinned where there is a GPU). `offload_shards`: nothing of them stays on the
  /// device, not even in the compute dtype.
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
  IndexRange range;            // of its elements in row-major order; may be empty
  torch::Tensor value;         // [range.size()], a view of the shard
  torch::Tensor gradient;      // the same of the gradient; undefined if none yet
};

/// Every rank of both groups makes one, adds the same units in the same order and
/// makes the same calls. `replicate`: ranks with the same shard, whose gradients
/// are summed after the reduce-scatter (hybrid sharding); of size 1 for none.
/// Gradients are averaged: sums over both groups, divided by the number of ranks.
/// One thread of a rank calls at a time; backward may run on others.
class ShardedUnits {
 public:
  ShardedUnits(Group shard, Group replicate, ShardedUnitsOptions options = {});
  ~ShardedUnits();
  ShardedUnits(const ShardedUnits&) = delete;
  ShardedUnits& operator=(const ShardedUnits&) = delete;

  /// Cuts the parameters: rank 0's values are the first ones unless `equal`, which
  /// says that all ranks have the same. Each tensor stays the object that modules
  /// hold; its memory is freed (stage 3) or becomes a view of the unit's buffer.
  /// One without requires_grad is cut too and never updated. Returns the unit's
  /// index. Throws ConfigError for a parameter that another unit has, is a view,
  /// sparse or not floating point, by name.
  size_t add(
      const std::string& name,
      const std::vector<std::pair<std::string, torch::Tensor>>& parameters,
      bool equal = true);
  size_t size() const;
  /// The index of the unit that has `parameter`, if one has.
  std::optional<size_t> unit_of(const torch::Tensor& parameter) const;

  /// `forward`, with the units' parameters gathered while it runs and when backward
  /// comes to it. A unit may be used by several forwards (a tied parameter).
  std::function<std::vector<torch::Tensor>(const std::vector<torch::Tensor>&)>
  wrap(
      std::vector<size_t> units,
      std::function<
          std::vector<torch::Tensor>(const std::vector<torch::Tensor>&)>
          forward);

  /// While it lives the units' parameters are gathered; values that are written to
  /// them are lost. All of them when `units` is empty.
  class Gathered;
  std::unique_ptr<Gathered> gather(std::vector<size_t> units = {});

  /// What the backwards from now on are: `last`: of a step, so that gradients are
  /// reduced in every stage. Before the last one stage 1 keeps whole gradients,
  /// stages 2 and 3 reduce and add up shards. (`keep_whole`: none reduces before
  /// the last, as no_sync() of data parallelism.)
  void begin_backward(bool last, bool keep_whole = false);
  /// After the last backward of a step: reduces what is left (unused parameters
  /// count as zeros where another rank, or another parameter of the unit, has a
  /// gradient), and waits. Throws CommError, naming the unit.
  void finish();
  /// After the shards were updated: whole parameters that are kept are gathered
  /// anew (stages 1 and 2: while the next forward begins), others forgotten.
  void after_update();

  /// Flat shards for the optimizer, by unit, in two kinds: with `weight_decay` (a
  /// parameter of two and more dimensions) and without. Their .grad is set by
  /// finish().
  struct FlatShard {
    std::string name;  // "transformer.h.0/decay"
    bool decays = false;
    torch::Tensor tensor;
  };
  std::vector<FlatShard> flat_shards() const;
  /// By parameter: every one that was added, in that order.
  std::vector<ShardedPart> parts() const;

  /// Bytes, for the plan of memory: of one unit's gathered buffer and flat gradient.
  struct UnitBytes {
    std::string name;
    int64_t shard = 0;     // master copies that are here
    int64_t gathered = 0;  // whole, in the compute dtype
    int64_t gradient = 0;  // flat
  };
  std::vector<UnitBytes> bytes() const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace echelon
