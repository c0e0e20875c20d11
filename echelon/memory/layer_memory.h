// The settings of [memory] applied to a list of layers: what each of them
// computes again in backward, and where what it keeps is stored.
//
//   const auto costs = recompute_costs(list, inputs);       // of a microbatch
//   LayerMemory memory(options, plan_recompute(options, costs, in_flight));
//   for each layer i that is built:                        // after sharding
//     layer.forward = memory.wrap(i, layer.name, layer.forward, *layer.module);
//
// Outside of what ShardedUnits::wrap returns, so that a second forward gathers
// parameters again.
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

/// What each layer keeps for backward, and computes again, in each of the three
/// ways: counted on the meta device, as count_layers does. All ranks of a
/// tensor-parallel group may call it, or one.
std::vector<RecomputeCost>
recompute_costs(const LayerList& layers, const std::vector<TensorSpec>& inputs);

/// One for all layers of a rank. A value; copies share it.
class LayerMemory {
 public:
  /// `recompute`: by the numbers that wrap() is called with. Of activations
  /// that go elsewhere, storages below `min_bytes` stay.
  LayerMemory(
      const MemoryOptions& options, std::vector<Recompute> recompute,
      int64_t min_bytes = 1 << 16);

  /// `forward` with the settings around it; `module` (null: none) has the
  /// layer's parameters and buffers. `number`: of the layer, from 0.
  LayerForward wrap(
      size_t number, const std::string& name, LayerForward forward,
      std::shared_ptr<torch::nn::Module> module) const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

/// The list with each layer's forward replaced when it is built, by
/// wrap(its number, its name, its module, its forward).
LayerList with_forwards(
    const LayerList& layers,
    std::function<LayerForward(size_t, const std::string&, const BuiltLayer&)>
        wrap);

/// The list as it is run with these choices: count_layers of it says what each
/// layer then keeps, and computes in both directions.
LayerList
with_recompute(const LayerList& layers, const std::vector<Recompute>& choices);

}  // namespace echelon
