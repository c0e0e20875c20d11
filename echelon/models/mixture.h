// A mixture of experts in place of a block's MLP: a router chooses for each
// token a few of many small MLPs. parallel/expert/ has the routing.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "echelon/architecture/language_model.h"
#include "echelon/layers/sharded_module.h"
#include "echelon/parallel/expert/routing.h"
#include "echelon/parallel/tensor/tensor_parallel.h"

namespace echelon::models {

/// The router and the experts of a block, under the names of its architecture
/// (ExpertNames):
///
///   gate.weight              [experts, hidden], on every rank
///   experts.E.GATE.weight, experts.E.UP.weight  [intermediate_r, hidden]
///   experts.E.DOWN.weight    [hidden, intermediate_r]
///
/// A rank of parallel.experts has its share of the experts (experts_of); in a
/// tensor-parallel group each expert's inner features are sharded. With
/// several ranks in parallel.experts the gradients of experts are divided by
/// their number: averaged over the ranks that have the same experts, they are
/// the averages over all data-parallel ranks.
class MixtureOfExperts : public torch::nn::Module {
 public:
  /// `label`: "model.layers.0.mlp", for collectives.
  MixtureOfExperts(
      const LanguageModelShape& shape, TensorParallel parallel,
      std::string label);

  struct Result {
    torch::Tensor y;
    torch::Tensor losses;  // [batch]; undefined: none, or in evaluation
  };
  /// x [batch, sequence, hidden], or with sharded tokens [tokens_r, hidden] ->
  /// y of the same shape. Every rank of both groups calls this.
  Result forward(const torch::Tensor& x, int64_t batch, int64_t sequence);

 private:
  struct Expert {
    torch::Tensor gate, up, down;
  };
  torch::Tensor
  compute(const torch::Tensor& rows, const std::vector<int64_t>& counts) const;

  TensorParallel parallel_;
  std::string label_;
  RoutingOptions routing_;
  torch::Tensor router_;
  std::vector<Expert> experts_;  // this rank's
};

}  // namespace echelon::models
