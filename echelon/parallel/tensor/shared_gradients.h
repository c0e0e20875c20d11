// Sums gradients of which each rank of a tensor-parallel group computes one
// term. With sharded tokens these are the gradients of norms, position
// embeddings and biases after a sum, which each rank applies to its tokens;
// always those of key/value heads that several ranks hold and apply to
// different query heads.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <string>
#include <vector>

#include "echelon/layers/sharded_module.h"
#include "echelon/parallel/tensor/tensor_parallel.h"

namespace echelon {

/// The parameters of a network that ParameterShard::sum_gradients marks.
///
///   SharedGradients shared(network, tensor_parallel);
///   for each step:
///     …                        // backward of every microbatch
///     shared.finish();
///     clip_gradients(…);
///     optimizer->step();
///
/// Call finish() once a step, after the last backward: it would count gradients
/// that are already summed again. It commutes with the sums and averages of
/// data parallelism, so it may run before or after them.
///
/// Every rank of the group constructs one, for networks of the same parameters
/// in the same order; the constructor communicates nothing. Between two calls
/// of finish() parameters may move to another device or dtype.
class SharedGradients {
 public:
  SharedGradients(
      const torch::nn::Module& network, const TensorParallel& parallel);

  /// Sets `grad` of each of these parameters to what one device computes, for
  /// the shard on this rank. A gradient that backward did not reach counts as
  /// zeros; one that it reached on no rank stays undefined. Costs one coalesced
  /// all-reduce per dtype, in place where this rank has the whole parameter;
  /// nothing if there is nothing to sum, or one rank.
  void finish();
  /// The same for those among `parameters`, whose gradients are complete
  /// earlier.
  void finish(const std::vector<torch::Tensor>& parameters);

  /// The number of parameters whose gradients are summed.
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
