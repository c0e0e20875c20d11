// Parameters of each rank, and the bytes of weights, gradients and optimizer
// state that they stand for. Source: Rajbhandari et al., 2020,
// arXiv:1910.02054, section 5 (stages of ZeRO).
#pragma once

#include <string_view>
#include <vector>

#include "echelon/cost/model_shape.h"
#include "echelon/cost/stack.h"
#include "echelon/cost/strategy.h"
#include "echelon/timeline/memory_kind.h"

namespace echelon {

/// Elements on one rank of tensor and expert parallelism, before ZeRO cuts
/// them.
struct RankParameters {
  double dense = 0;
  double experts = 0;  // that other ranks do not all have
  /// The largest unit that sharding gathers at a time, and embedding with head.
  double largest_unit = 0;
  double embedding_and_head = 0;

  double total() const { return dense + experts; }
  bool operator==(const RankParameters&) const = default;
};

/// By pipeline stage. Throws ConfigError when there are fewer layers than
/// stages.
std::vector<RankParameters>
stage_parameters(const ModelShape& model, const Strategy& strategy);

/// Numbers of an element that an optimizer keeps: 2 for adamw, 1 for momentum.
double optimizer_states(std::string_view optimizer);

/// Ranks that share one copy of what ZeRO cuts: of dense parameters, of
/// experts.
double dense_shards(const Strategy& strategy, const Stack& stack);
double expert_shards(const Strategy& strategy, const Stack& stack);

/// Weights, gradients and optimizer state of a rank with these parameters, all
/// of its stages together; what is gathered is MemoryKind::gathered. Offloaded
/// state is in `host_bytes`.
struct StateBytes {
  MemoryByKind device;
  double host_bytes = 0;
};
StateBytes state_bytes(
    const RankParameters& parameters, const Strategy& strategy,
    const Stack& stack);

}  // namespace echelon
