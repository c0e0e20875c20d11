// Which way of context parallelism a layout takes: [layout] context = "auto".
#pragma once

#include <string>

#include "echelon/cluster/cluster.h"
#include "echelon/cost/model_shape.h"
#include "echelon/cost/strategy.h"

namespace echelon::cost {

struct ContextWayChoice {
  ContextParallelOptions options;
  /// "ring: 1.2 ms a layer for 8192 tokens and 8 heads; ulysses 1.3 ms, …".
  /// Empty where there was nothing to choose.
  std::string why;
};

/// The way with which forward and backward of a block take least by the
/// formulas (transformer_work.cpp), of those that the heads of a rank of tp
/// allow. Ways within 1 % of it count as equal: the first of ring, all_gather,
/// ulysses and ulysses_ring is taken, groups of few before those of many. What
/// `strategy.context` sets stays. `model` is a transformer.
ContextWayChoice choose_context_way(
    const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster);

/// Whether nothing has chosen yet how `context` works.
inline bool is_open(const ContextParallelOptions& context) {
  return context.way == ContextWay::automatic ||
         (context.way == ContextWay::ulysses_ring && context.ulysses == 0);
}

}  // namespace echelon::cost
