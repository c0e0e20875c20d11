// What the cost model chooses where a configuration leaves it open: the way of
// context parallelism (context_way.h), and the chunks of matmuls of tensor
// parallelism.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "echelon/cluster/cluster.h"
#include "echelon/cost/model_shape.h"
#include "echelon/cost/strategy.h"

namespace echelon::cost {

/// Seconds of a transformer block in forward, and of the gradients of its
/// inputs. The devices are those of rank 0.
double block_seconds(
    const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster);

/// A way that a strategy leaves open, and a block's seconds with it.
struct OpenWay {
  std::string name;
  double seconds = 0;
};

/// The number of the first of `ways` whose seconds are within 1 % of the least,
/// and why: "ring: 2.1 ms a layer by the cost model, for WHAT; ulysses 2.6 ms".
std::pair<size_t, std::string>
cheapest(const std::vector<OpenWay>& ways, const std::string& what);

struct ProductChunksChoice {
  int64_t chunks = 1;
  /// "4: 2.1 ms a layer by the cost model …; 1 2.6 ms, 2 2.2 ms, 8 2.2 ms".
  /// Empty where there was nothing to choose.
  std::string why;
};

/// The chunks, of 1, 2, 4 and 8, with which a block takes least
/// (block_seconds): a collective of more chunks is hidden more, and each of
/// them has its latency and its launch, and a smaller matmul. Numbers within 1
/// % of it count as equal: the fewest are taken. 1 on processors, where a
/// collective takes the cores of the matmul beside it. What
/// `strategy.product_chunks` sets stays.
ProductChunksChoice choose_product_chunks(
    const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster);

/// The strategy with all that is chosen for it.
Strategy with_choices(
    const ModelShape& model, Strategy strategy,
    const cluster::Cluster& cluster);

}  // namespace echelon::cost
