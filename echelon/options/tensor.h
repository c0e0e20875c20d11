// Settings of tensor parallelism next to its degree.
#pragma once

#include <cstdint>

namespace echelon {

struct TensorParallelOptions {
  /// Each rank computes norms, dropout and residual sums on a shard of the
  /// tokens: all-gather and reduce-scatter replace all-reduce.
  bool sequence_parallel = false;
  /// Chunks of a matmul: the results of one are summed while the next is
  /// computed, and sharded tokens of the next are all-gathered while one is
  /// multiplied. 1: no chunks.
  int64_t overlap_chunks = 1;

  bool operator==(const TensorParallelOptions&) const = default;
};

}  // namespace echelon
