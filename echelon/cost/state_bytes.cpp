// This file computes the parameters that one rank holds of each stage, and then
// the bytes of their weights, gradients and optimizer state. sharing_axes()
// decides by how many ranks ZeRO divides them; experts leave out ep, since
// other ranks of ep have other experts. The frameworks differ in what they keep
// unsharded, and in which dtype (Framework::memory).
#include <algorithm>
#include <string>

#include "echelon/cost/memory_estimate.h"
#include "echelon/cost/strategy.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::cost {
namespace {

// The axes of dense parameters. Those of experts leave out the last one, ep.
constexpr Axis kAll[] = {
    Axis::dp_replicate, Axis::dp_shard, Axis::cp, Axis::ep};
constexpr Axis kWithCp[] = {Axis::dp_shard, Axis::cp, Axis::ep};
constexpr Axis kWithoutCp[] = {Axis::dp_shard, Axis::ep};

// The axes of copies of sharded parameters. cp is one where it does not shard.
constexpr Axis kCopies[] = {Axis::dp_replicate, Axis::cp};

void check_stages(const ModelShape& model, int64_t layers, int64_t stages) {
  if (layers >= stages) return;
  throw ConfigError(format(
      "pp: {}, but {} has {}; take fewer", counted(stages, "stage"), model.name,
      counted(layers, "layer")));
}

RankParameters block_of(
    const TransformerShape& shape, const Strategy& strategy, bool experts) {
  const BlockParameters block = block_parameters(shape, experts);
  const double tp = as_double(strategy.layout.tp);
  RankParameters part;
  part.dense =
      (block.attention + block.feed_forward) / tp + block.norms + block.router;
  part.experts = block.experts / (tp * as_double(strategy.layout.ep));
  part.largest_unit = part.total();
  return part;
}

void add(RankParameters& stage, const RankParameters& layer, double times) {
  stage.dense += times * layer.dense;
  stage.experts += times * layer.experts;
  stage.largest_unit = std::max(stage.largest_unit, layer.largest_unit);
}

std::vector<RankParameters>
transformer_stages(const ModelShape& model, const Strategy& strategy) {
  const TransformerShape& shape = *model.transformer;
  const int64_t stages = num_stages(strategy);
  check_stages(model, shape.layers + 2, stages);  // embedding and head as well
  const RankParameters dense = block_of(shape, strategy, false);
  const RankParameters expert =
      shape.experts.experts > 0 ? block_of(shape, strategy, true) : dense;
  std::vector<RankParameters> parts(static_cast<size_t>(stages));
  int64_t layer = 0;
  size_t stage = 0;
  for (const int64_t blocks : stage_layers(model, strategy)) {
    int64_t with_experts = 0;
    for (const int64_t end = layer + blocks; layer < end; ++layer) {
      with_experts += shape.has_experts(layer);
    }
    if (blocks > with_experts) {
      add(parts[stage], dense, as_double(blocks - with_experts));
    }
    if (with_experts > 0) add(parts[stage], expert, as_double(with_experts));
    ++stage;
  }
  const double tp = as_double(strategy.layout.tp);
  const auto end = [&](RankParameters& part, double elements) {
    part.dense += elements / tp;
    part.embedding_and_head += elements / tp;
    part.largest_unit = std::max(part.largest_unit, elements / tp);
  };
  end(parts.front(), embedding_parameters(shape));
  // A tied head shares its tensor with the embedding only on the same rank.
  const bool copy = shape.tied && !ends_on_one_rank(strategy);
  end(parts.back(), head_parameters(shape) +
                        (copy ? as_double(shape.vocab * shape.hidden) : 0));
  return parts;
}

std::vector<RankParameters>
counted_stages(const ModelShape& model, const Strategy& strategy) {
  const int64_t stages = num_stages(strategy);
  const auto layers = static_cast<int64_t>(model.layers.size());
  check_stages(model, layers, stages);
  std::vector<RankParameters> parts(static_cast<size_t>(stages));
  const std::vector<int64_t> counts = stage_layers(model, strategy);
  int64_t layer = 0;
  for (size_t stage = 0; stage < parts.size(); ++stage) {
    for (const int64_t end = layer + counts[stage]; layer < end; ++layer) {
      const double elements =
          model.layers[static_cast<size_t>(layer)].parameters /
          as_double(strategy.layout.tp);
      add(parts[stage], {.dense = elements, .largest_unit = elements}, 1);
    }
  }
  return parts;
}

bool gradients_stay_gathered(
    const Strategy& strategy, const Framework& framework) {
  return framework.gathers_gradients && strategy.zero_stage == 3 &&
         strategy.unshard_once && strategy.layout.pp > 1;
}

int64_t bytes(double value) {
  return static_cast<int64_t>(value);
}

}  // namespace

SharingAxes sharing_axes(
    const Strategy& strategy, const Framework& framework, bool experts) {
  const auto of = [&](std::span<const Axis> axes) {
    return experts ? axes.first(axes.size() - 1) : axes;
  };
  if (strategy.zero_stage == 0) return {.shards = {}, .copies = of(kAll)};
  const std::span<const Axis> copies = kCopies;
  if (framework.memory.shards_over_cp) {
    return {.shards = of(kWithCp), .copies = copies.first(1)};
  }
  return {.shards = of(kWithoutCp), .copies = copies};
}

bool gradients_are_reduced_often(
    const Strategy& strategy, const Framework& framework) {
  return framework.reduces_each_microbatch && strategy.zero_stage >= 2 &&
         !gradients_stay_gathered(strategy, framework);
}

std::vector<RankParameters>
stage_parameters(const ModelShape& model, const Strategy& strategy) {
  return model.transformer ? transformer_stages(model, strategy)
                           : counted_stages(model, strategy);
}

double optimizer_states(const Strategy& strategy) {
  if (strategy.optimizer != OptimizerKind::sgd) return 2;
  return strategy.momentum > 0 ? 1 : 0;
}

double zero_shards(
    const Strategy& strategy, const Framework& framework, bool experts) {
  double shards = 1;
  for (const Axis axis : sharing_axes(strategy, framework, experts).shards) {
    shards *= as_double(strategy.layout.degree(axis));
  }
  return shards;
}

// Frameworks either keep masters beside 16-bit weights (masters_beside), or
// masters alone, from which 16-bit copies are made. `part` is the rank's share
// under ZeRO, `whole` what it would hold without.
StateBytes state_bytes(
    const RankParameters& rank, const Strategy& strategy,
    const Framework& framework) {
  const double element = element_bytes(strategy.precision);
  const double master = element_bytes(strategy.master);
  const double whole = rank.total();
  const double part = rank.dense / zero_shards(strategy, framework, false) +
                      rank.experts / zero_shards(strategy, framework, true);
  const int64_t stage = strategy.zero_stage;
  const double gradient = framework.memory.gradient_bytes > 0
                              ? framework.memory.gradient_bytes
                              : element;
  const double prefetched = framework.memory.prefetch * rank.largest_unit;
  double weights = 0, gradients = 0, optimizer = 0, unsharded = 0;
  optimizer = optimizer_states(strategy) * master * part;
  if (framework.memory.masters_beside) {
    weights = element * (stage == 3 ? part : whole);
    gradients = gradient * (stage >= 2 ? part : whole) +
                framework.memory.master_gradient_bytes * part;
    if (element < master) optimizer += master * part;
  } else {
    weights = master * part;
    const bool copies = stage == 0 ? element != master : stage < 3;
    if (copies && framework.memory.keeps_copies) unsharded += element * whole;
    gradients = stage >= 2 ? master * part : gradient * whole;
    if (stage == 1) gradients += master * part;
  }
  if (stage == 3 && strategy.unshard_once &&
      framework.memory.reduce_bytes > 0) {
    // Unsharded gradients are summed over microbatches before the
    // reduce-scatter.
    gradients += framework.memory.reduce_bytes * whole;
  }
  if (gradients_stay_gathered(strategy, framework))
    gradients += element * whole;
  if (stage == 3) {
    unsharded += strategy.unshard_once
                     ? element * whole
                     : element * (rank.largest_unit + prefetched);
    if (framework.memory.keeps_embedding && !strategy.unshard_once) {
      unsharded += element * rank.embedding_and_head;
    }
  }
  StateBytes state;
  if (stage >= 2) {
    state.device[timeline::MemoryKind::communication] =
        bytes((element + framework.memory.reduce_bytes) * rank.largest_unit);
  }
  if (strategy.offload_optimizer) {
    state.host_bytes =
        optimizer + (framework.memory.masters_beside ? 0 : weights);
    optimizer = 0;
    if (!framework.memory.masters_beside) weights = 0;
  }
  state.device[timeline::MemoryKind::parameters] = bytes(weights);
  state.device[timeline::MemoryKind::gradients] = bytes(gradients);
  state.device[timeline::MemoryKind::optimizer_state] = bytes(optimizer);
  state.device[timeline::MemoryKind::unsharded] = bytes(unsharded);
  return state;
}

}  // namespace echelon::cost
