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
  /// multiplied. 1: no chunks. 0: on GPUs as the cost model says
  /// (cost/choices.h), else 1.
  int64_t overlap_chunks = 0;

  bool operator==(const TensorParallelOptions&) const = default;
};

}  // namespace echelon
