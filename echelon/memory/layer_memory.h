// The settings of [memory] applied to a list of layers: what each layer
// recomputes in backward, and where its activations are stored.
//
//   const auto costs = recompute_costs(list, inputs);       // of a microbatch
//   LayerMemory memory(options, plan_recompute(options, costs, in_flight));
//   for each layer i that is built:                        // after sharding
//     layer.forward = memory.wrap(i, layer.name, layer.forward, *layer.module);
//
// Apply it outside of what ShardedUnits::wrap returns, so that a second forward
// unshards the parameters again.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "echelon/cost/choose_recompute.h"
#include "echelon/counting/layer_cost.h"
#include "echelon/layers/layer_list.h"
#include "echelon/memory/recompute.h"
#include "echelon/options/memory.h"

namespace echelon {

/// Bytes that each layer keeps for backward and flops that it recomputes, for
/// each of the three choices, counted on the meta device as by count_layers.
/// Either all ranks of a tensor-parallel group call it, or one.
std::vector<cost::RecomputeCost> recompute_costs(
    const LayerList& layers, const std::vector<counting::TensorSpec>& inputs);

/// One instance for all layers of a rank. A value; copies share it.
class LayerMemory {
 public:
  /// `recompute`: indexed by the number that wrap() is called with. Activations
  /// in storages below `min_bytes` are neither moved nor compressed.
  LayerMemory(
      const MemoryOptions& options, std::vector<cost::Recompute> recompute,
      int64_t min_bytes = 1 << 16);

  /// `forward` with the settings around it; `module` (null: none) has the
  /// parameters and buffers of the layer. `number`: the layer's, from 0.
  LayerForward wrap(
      size_t number, const std::string& name, LayerForward forward,
      std::shared_ptr<torch::nn::Module> module) const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

/// The list with each layer's forward replaced when it is built, by
/// wrap(its number, its name, the built layer).
LayerList with_forwards(
    const LayerList& layers,
    std::function<LayerForward(size_t, const std::string&, const BuiltLayer&)>
        wrap);

/// The list as it runs with these choices. count_layers of it returns what each
/// layer then keeps and computes in both directions.
LayerList with_recompute(
    const LayerList& layers, const std::vector<cost::Recompute>& choices);

}  // namespace echelon
