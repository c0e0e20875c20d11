// Parameters of each rank, and their bytes of weights, gradients and optimizer
// state. Source: Rajbhandari et al., 2020, arXiv:1910.02054, section 5 (stages
// of ZeRO).
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "echelon/cost/framework.h"
#include "echelon/cost/model_shape.h"
#include "echelon/cost/strategy.h"
#include "echelon/timeline/memory_kind.h"

namespace echelon {

/// Elements on one rank of tensor and expert parallelism, before ZeRO shards
/// them.
struct RankParameters {
  double dense = 0;
  double experts = 0;  // not replicated along ep
  /// The largest group of parameters that is unsharded at a time.
  double largest_unit = 0;
  double embedding_and_head = 0;

  double total() const { return dense + experts; }
  bool operator==(const RankParameters&) const = default;
};

/// By pipeline stage. Throws ConfigError when there are fewer layers than
/// stages.
std::vector<RankParameters>
stage_parameters(const ModelShape& model, const Strategy& strategy);

/// Values that an optimizer keeps for an element: 2 for adamw, 1 for momentum.
double optimizer_states(std::string_view optimizer);

/// The axes along which ranks share parameters. Ranks of context parallelism
/// have the same parameters; in some frameworks they shard them
/// (FrameworkMemory::shards_over_cp).
struct SharingAxes {
  std::span<const Axis> shards;  // ranks that ZeRO shards over; none in stage 0
  std::span<const Axis> copies;  // other ranks that sum the gradients
};

/// Of dense parameters, or of experts, which are not replicated along ep.
SharingAxes sharing_axes(
    const Strategy& strategy, const Framework& framework, bool experts);

/// Number of ranks that ZeRO shards one copy over, of dense parameters or of
/// experts.
double
zero_shards(const Strategy& strategy, const Framework& framework, bool experts);

/// Weights, gradients and optimizer state of a rank with these parameters, over
/// all of its stages. Unsharded parameters are MemoryKind::gathered; offloaded
/// state is in `host_bytes`.
struct StateBytes {
  MemoryByKind device;
  double host_bytes = 0;
};
StateBytes state_bytes(
    const RankParameters& parameters, const Strategy& strategy,
    const Framework& framework);

}  // namespace echelon
