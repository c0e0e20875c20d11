// Sums of gradients of which backward leaves each rank of a tensor-parallel
// group a part: parameters that are applied to a part of the tokens on each
// rank (norms, position embeddings, biases behind a sum, when tokens are cut),
// and keys and values that several ranks hold and apply to different heads.
#pragma once

#include <torch/types.h>

#include <string>
#include <vector>

#include "echelon/layers/sharded_module.h"
#include "echelon/parallel/tensor/tensor_parallel.h"

namespace torch::nn {
class Module;
}

namespace echelon {

/// The parameters of a network that ParameterShard::sum_gradients marks, and
/// their sums over the ranks.
///
///   SharedGradients shared(network, tensor_parallel);
///   each step: backward of every microbatch; shared.finish(); clip; step;
///
/// finish() is called once a step, after the last backward: gradients that were
/// summed already would be counted again. It commutes with the sums and
/// averages of data parallelism, so it may come before or after them.
///
/// All ranks of the group call, with networks of the same parameters in the
/// same order; the constructor communicates nothing. The parameters are looked
/// at by finish(): they may move to another device or dtype in between.
class SharedGradients {
 public:
  SharedGradients(
      const torch::nn::Module& network, const TensorParallel& parallel);

  /// After it `grad` of each such parameter is what one device computes, for
  /// the part that is here. A gradient that backward did not reach counts as
  /// zeros; where it reached no rank's, it stays undefined. One coalesced
  /// all-reduce per dtype; gradients are summed in place where the parameter is
  /// whole here. No call when there is nothing to sum, or one rank.
  void finish();
  /// The same for those among `parameters`, whose gradients are complete before
  /// the others'.
  void finish(const std::vector<torch::Tensor>& parameters);

  /// How many parameters are summed.
  size_t size() const { return shared_.size(); }

 private:
  struct Shared {
    torch::Tensor parameter;
    Shard shard;
  };

  void sum(const std::vector<Shared>& shared);
  void sum_of_one_dtype(const std::vector<Shared>& shared);

  Group group_;
  std::vector<Shared> shared_;
};

}  // namespace echelon
