// A mixture of experts in place of a block's MLP: a router chooses for each
// token a few of many small MLPs. parallel/expert/ has the routing.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "echelon/architecture/language_model.h"
#include "echelon/comm/group.h"
#include "echelon/layers/sharded_module.h"
#include "echelon/parallel/expert/routing.h"
#include "echelon/parallel/tensor/mlp.h"
#include "echelon/parallel/tensor/tensor_parallel.h"

namespace echelon::models {

/// The router's matrix and, where the architecture has it, the bias of each
/// expert for the choice: "weight" [experts, hidden] and the buffer
/// "e_score_correction_bias" [experts].
struct Router : torch::nn::Module {
  /// `mixture`: the name of its module, as mixture_names() has it.
  Router(const LanguageModelShape& shape, std::string mixture);

  /// Adds what a forward pass in training assigned to the experts, unless it is
  /// a second run of recomputation.
  ///
  ///   loads, dropped  int64 [experts], as Assignment has them
  void count(const torch::Tensor& loads, const torch::Tensor& dropped = {});

  std::string mixture;
  torch::Tensor weight;
  torch::Tensor bias;            // undefined: none
  double rate = 0;               // of the bias, in a step
  torch::Tensor loads, dropped;  // of this step here; undefined: none yet
};

/// What the routers of a rank's part of a model do at the end of a step.
///
/// Loss-free balancing: the bias of each expert that got fewer tokens than the
/// mean rises by the rate, and that of one that got more falls. Source: Wang et
/// al., 2024, arXiv:2408.15664, algorithm 1.
class RouterSteps {
 public:
  /// Of all routers in `networks`. Every rank of `data` makes one.
  ///
  ///   shape   of the whole model; none, or that of another model: there are
  ///           no counts()
  ///   data    the ranks that have other samples or other tokens
  ///   device  of counts()
  RouterSteps(
      const std::vector<std::shared_ptr<torch::nn::Module>>& networks,
      const std::optional<LanguageModelShape>& shape, Group data,
      torch::Device device);

  /// Every rank of the group calls it once a step, after the last backward
  /// pass. Biases then are equal on all of them. One all-reduce of whole
  /// numbers, "expert loads"; none without biases that move. Reads nothing on
  /// the host.
  void finish();

  /// What this rank's tokens were in the last step that was finished: how many
  /// chose each expert, and how many of these were dropped. int64 [2, mixtures,
  /// experts], with zeros for mixtures that other ranks have. Undefined in a
  /// model without experts.
  const torch::Tensor& counts() const { return counts_; }

 private:
  torch::Tensor
  whole_model(const torch::Tensor& loads, const torch::Tensor& dropped) const;
  void balance(const torch::Tensor& loads) const;

  std::vector<std::shared_ptr<Router>> routers_;
  Group data_;
  torch::Device device_;
  int64_t mixtures_ = 0;  // of the whole model
  int64_t experts_ = 0;
  torch::Tensor places_;  // of routers_, among the mixtures
  torch::Tensor counts_;
};

class ExpertMatrix;  // mixture.cpp

/// The router and the experts of a block, under the names of its architecture
/// (ExpertNames):
///
///   gate.weight              [experts, hidden], on every rank (Router)
///   experts.E.GATE.weight, experts.E.UP.weight  [intermediate_r, hidden]
///   experts.E.DOWN.weight    [hidden, intermediate_r]
///
/// and of DeepSeek-V3, as one MLP, experts that every token passes:
/// shared_experts.GATE.weight … .
///
/// All but the router may have adapters (parallel/tensor/linear.h).
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
    torch::Tensor losses;  // [batch]; undefined: none, or in evaluation. In a
                           // context-parallel group, the terms of the tokens
                           // here: the ranks' add up
  };
  /// x [batch, tokens, hidden], or with sharded tokens [tokens_r, hidden] -> y
  /// of the same shape. Every rank of all groups calls this.
  ///
  ///   sequence  tokens of whole samples; a rank of a context-parallel group
  ///             has a part of them
  Result forward(const torch::Tensor& x, int64_t batch, int64_t sequence);

 private:
  struct Expert {
    std::shared_ptr<ExpertMatrix> gate, up, down;
  };
  torch::Tensor
  compute(const torch::Tensor& rows, const RowCounts& counts) const;
  torch::Tensor compute_each(
      const torch::Tensor& rows, const RowCounts& counts, double share) const;

  TensorParallel parallel_;
  std::string label_;
  RoutingOptions routing_;
  std::shared_ptr<Router> router_;
  std::vector<Expert> experts_;       // this rank's
  std::shared_ptr<GatedMlp> shared_;  // null: none
};

}  // namespace echelon::models
