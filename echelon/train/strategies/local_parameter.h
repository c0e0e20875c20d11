// What a rank has of the model's parameters, which may be sharded over
// tensor-parallel ranks and over those of dp_shard.
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "echelon/layers/sharded_module.h"
#include "echelon/layout/shard.h"
#include "echelon/optim/clip.h"

namespace echelon {

/// One of the model's tensors, or what this rank has of it.
struct LocalParameter {
  std::string name;
  /// What the optimizer changes: the tensor, its tensor-parallel shard, or
  /// [range.size()] elements of either.
  torch::Tensor value;
  torch::Tensor gradient;  // the same elements; undefined: none yet
  /// The tensor-parallel shard; none: tensor-parallel ranks replicate it.
  std::optional<ParameterShard> shard;
  /// The elements, row-major, of the tensor or its shard; may be empty. None:
  /// all of them.
  std::optional<IndexRange> range;
};

/// The elements of `full`, of the full tensor's shape, that `part` has, in the
/// shape of part.value.
torch::Tensor
local_values(const torch::Tensor& full, const LocalParameter& part);

/// Copies `values`, of the shape of part.value, to their place in `full`.
void copy_into_full(
    torch::Tensor full, const torch::Tensor& values,
    const LocalParameter& part);

/// The elements of its parameters that a rank counts, for norms of gradients.
/// The ranks of tp, dp_shard and pp together count each element of the model
/// once, although some replicate it or have shards that overlap.
class CountedElements {
 public:
  /// Looks at names, shards, ranges and shapes, not at values.
  ///
  ///   tensor_rank  the rank in the tensor-parallel group, whose first rank
  ///                counts what all of them replicate
  ///   leave_out    parameters that another pipeline rank counts
  CountedElements(
      const std::vector<LocalParameter>& parts, int tensor_rank,
      const std::set<std::string>& leave_out = {});

  /// The counted elements of the gradients of `parts`, the same parameters;
  /// none of undefined gradients. Views, where possible.
  PartitionedGradients
  partition(const std::vector<LocalParameter>& parts, SumOverRanks sum) const;

  /// How many elements of parts[i] are counted.
  int64_t num_counted(size_t i) const;

 private:
  struct Counted {
    std::vector<IndexRange> pieces;  // of the local elements, row-major
    bool all = false;
    torch::Tensor indices;  // in place of many pieces
  };

  std::vector<Counted> counted_;
};

}  // namespace echelon
