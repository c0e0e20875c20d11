// What of a model's tensors a rank has and updates, when layers are cut over
// tensor-parallel ranks, and what of a layer is there over those of dp_shard.
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

/// One of the model's tensors, or what of it is here.
struct ParameterPart {
  std::string name;
  /// What the optimizer changes: the tensor, its tensor-parallel part, or
  /// [range.size()] elements of either.
  torch::Tensor value;
  torch::Tensor gradient;  // the same of the gradient; undefined: none yet
  std::optional<ParameterShard>
      shard;  // none: tensor-parallel ranks have it all
  /// Of the elements, in row-major order, of the tensor or of its
  /// tensor-parallel part; may be empty. None: all of them.
  std::optional<IndexRange> range;
};

/// What of `whole`, a tensor of the whole one's shape, the part is: of the
/// shape of part.value.
torch::Tensor part_of(const torch::Tensor& whole, const ParameterPart& part);

/// Copies `values`, of the shape of part.value, to their place in `whole`.
void copy_to_whole(
    torch::Tensor whole, const torch::Tensor& values,
    const ParameterPart& part);

/// Which elements of its parts a rank counts: with those of the other ranks of
/// tp, dp_shard and pp each element of the model once, though ranks have copies
/// of it, or parts that overlap.
class CountedParts {
 public:
  /// Looks at names, shards, ranges and shapes, not at values.
  ///
  ///   tensor_rank  in the tensor-parallel group, whose first rank counts what
  ///                all of its ranks have
  ///   leave_out    parameters that another rank of the pipeline counts
  CountedParts(
      const std::vector<ParameterPart>& parts, int tensor_rank,
      const std::set<std::string>& leave_out = {});

  /// Of gradients[i], that of parts[i], the counted elements; nothing of
  /// undefined ones. Views, where that is possible.
  std::vector<torch::Tensor>
  of(const std::vector<torch::Tensor>& gradients) const;
  /// The same, with the part that each is of.
  SharedOutGradients shared_out(
      const std::vector<torch::Tensor>& gradients, SumOverRanks sum) const;

  /// How many elements of parts[i] are counted.
  int64_t num_counted(size_t i) const;

 private:
  struct Counted {
    std::vector<IndexRange> pieces;  // of the part's elements, row-major
    bool all = false;
    torch::Tensor indices;  // in place of many pieces
  };

  std::vector<Counted> counted_;
};

/// The gradients of `parts`, undefined ones among them.
std::vector<torch::Tensor>
gradients_of(const std::vector<ParameterPart>& parts);

}  // namespace echelon
