// Settings of tensor parallelism beside its degree. Free of LibTorch.
#pragma once

#include <cstdint>

namespace echelon {

namespace config {
class Section;
}

struct TensorParallelOptions {
  /// Norms, dropout and residual sums each on a part of the tokens: all-gather
  /// and reduce-scatter in place of all-reduce.
  bool sequence_parallel = false;
  /// Pieces in which a product's results are summed while the next ones are
  /// computed, and in which cut tokens are gathered while those that are there
  /// are multiplied. 1: whole.
  int64_t overlap_chunks = 1;

  bool operator==(const TensorParallelOptions&) const = default;
};

/// sequence_parallel, overlap_chunks.
void bind(
    config::Section& section, TensorParallelOptions& options);  // [layout]

}  // namespace echelon
