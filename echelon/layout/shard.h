// Which part of a tensor a rank holds, when the tensor is cut along one of its
// dimensions.
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

/// A part of a tensor: some ranges of indices along `dim`, laid one after the
/// other, and everything along the other dimensions. A fused matrix of queries,
/// keys and values has three ranges, most have one. Parts of different ranks
/// may overlap: keys and values that several ranks need lie on each of them.
struct Shard {
  std::vector<int64_t> shape;      // of the whole tensor
  int64_t dim = 0;                 // that is cut
  std::vector<IndexRange> pieces;  // that are here, in the order of the memory
  /// Those of `pieces` that no rank before this one in the group has: every
  /// index of the whole is in exactly one rank's. What counts each element once
  /// (norms, checkpoints) reads these.
  std::vector<IndexRange> owned;

  /// Sizes of the part that is here.
  std::vector<int64_t> local_shape() const;
  bool operator==(const Shard&) const = default;
};

/// The whole tensor, held by every rank of a group and owned by the first.
Shard replicated(std::vector<int64_t> shape, int rank);

/// Range number `part` of `parts` of [0, total): sizes differ by at most one,
/// the larger ones first. Ranges may be empty when there are more parts than
/// elements.
IndexRange even_range(int64_t total, int64_t part, int64_t parts);

/// One range of `dim`, cut evenly.
Shard even_shard(
    std::vector<int64_t> shape, int64_t dim, int64_t part, int64_t parts);

}  // namespace echelon
