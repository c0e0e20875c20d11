// The part of a tensor that a rank holds, when the tensor is sharded along one
// dimension.
#pragma once

#include <cstdint>
#include <vector>

namespace echelon {

/// Indices [begin, end).
struct IndexRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
  bool operator==(const IndexRange&) const = default;
};

/// A part of a tensor: some ranges of indices along `dim`, one after the other,
/// and everything along the other dimensions. A fused matrix of queries, keys
/// and values has three ranges, most tensors have one. Shards of different
/// ranks may overlap: keys and values that several ranks need are on each of
/// them.
struct Shard {
  std::vector<int64_t> shape;      // of the full tensor
  int64_t dim = 0;                 // the sharded dimension
  std::vector<IndexRange> pieces;  // held here, in the order of the memory
  /// The ranges of `pieces` that no earlier rank of the group has, so that
  /// exactly one rank owns each index of the full tensor. Norms and
  /// checkpoints, which count each element once, read these.
  std::vector<IndexRange> owned;

  /// The shape of the part that is held here.
  std::vector<int64_t> local_shape() const;
  bool operator==(const Shard&) const = default;
};

/// The full tensor, held by every rank of a group and owned by the first.
Shard replicated(std::vector<int64_t> shape, int rank);

/// Range number `part` of `parts` of [0, total): sizes differ by at most one,
/// the larger ones first. Ranges may be empty when there are more parts than
/// elements.
IndexRange even_range(int64_t total, int64_t part, int64_t parts);

/// One range of `dim`, sharded evenly.
Shard even_shard(
    std::vector<int64_t> shape, int64_t dim, int64_t part, int64_t parts);

}  // namespace echelon
