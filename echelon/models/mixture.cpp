// With sharded tokens, the ranks of a tensor-parallel group first gather them,
// and each routes them all alike. What the experts compute is then a partial
// sum on each rank, of its inner features. So tokens and weights enter the
// experts by copy_to, whose backward sums their gradients over the ranks, and
// the result leaves by reduce_from.
#include "echelon/models/mixture.h"

#include <torch/nn/module.h>
#include <torch/types.h>

#include <utility>

#include "echelon/comm/differentiable.h"
#include "echelon/parallel/expert/exchange.h"
#include "echelon/parallel/tensor/mlp.h"

namespace echelon::models {
namespace {

using torch::Tensor;

// A matrix without a computation of its own.
struct Matrix : ShardedModule {
  explicit Matrix(ParameterShard shard)
      : weight(register_shard("weight", std::move(shard))) {}
  Tensor weight;
};

// One that every rank has.
struct WholeMatrix : torch::nn::Module {
  WholeMatrix(int64_t rows, int64_t columns)
      : weight(register_parameter("weight", torch::empty({rows, columns}))) {}
  Tensor weight;
};

}  // namespace

MixtureOfExperts::MixtureOfExperts(
    const LanguageModelShape& shape, TensorParallel parallel, std::string label)
    : parallel_(std::move(parallel)),
      label_(std::move(label)),
      routing_{
          .experts = shape.experts,
          .per_token = shape.experts_per_token,
          .normalize = shape.normalize_routing,
          .aux_loss = shape.aux_loss,
          .z_loss = shape.z_loss} {
  const auto& names = shape.kind->experts;
  const int64_t hidden = shape.hidden_size;
  const int64_t inner = shape.intermediate_size;
  router_ = register_module(
                "gate", std::make_shared<WholeMatrix>(shape.experts, hidden))
                ->weight;
  const auto list =
      register_module("experts", std::make_shared<torch::nn::Module>());
  const auto sharded = [&](std::vector<int64_t> sizes, int64_t dim) {
    return std::make_shared<Matrix>(ParameterShard{
        even_shard(std::move(sizes), dim, parallel_.rank(), parallel_.size())});
  };
  const auto own = experts_of(shape.experts, parallel_.experts);
  for (int64_t i = own.begin; i < own.end; ++i) {
    const auto expert = list->register_module(
        std::to_string(i), std::make_shared<torch::nn::Module>());
    experts_.push_back(
        {.gate =
             expert->register_module(names.gate, sharded({inner, hidden}, 0))
                 ->weight,
         .up = expert->register_module(names.up, sharded({inner, hidden}, 0))
                   ->weight,
         .down =
             expert->register_module(names.down, sharded({hidden, inner}, 1))
                 ->weight});
  }
}

// Experts without rows compute all the same: their gradients are then zeros.
Tensor MixtureOfExperts::compute(
    const Tensor& rows, const std::vector<int64_t>& counts) const {
  const double share = 1.0 / parallel_.experts.size();
  std::vector<Tensor> results;
  int64_t begin = 0;
  for (size_t i = 0; i < experts_.size(); ++i) {
    const auto own = rows.narrow(0, begin, counts[i]);
    begin += counts[i];
    const auto times = [&](const Tensor& x, const Tensor& weight) {
      return at::linear(x, with_scaled_gradient(weight, share));
    };
    const auto& expert = experts_[i];
    results.push_back(times(
        silu_times(times(own, expert.gate), times(own, expert.up)),
        expert.down));
  }
  return at::cat(results);
}

MixtureOfExperts::Result
MixtureOfExperts::forward(const Tensor& x, int64_t batch, int64_t sequence) {
  const auto& group = parallel_.group;
  const bool sharded = parallel_.splits_tokens();
  const auto sizes = even_split(batch * sequence, group.size());
  const auto tokens = sharded
                          ? gather_from(x, group, 0, sizes, label_ + " gather")
                          : x.reshape({batch * sequence, x.size(-1)});
  auto routing =
      route(at::linear(tokens, router_), routing_, batch, is_training());
  const Assignment assignment(routing.experts, routing_.experts);
  const Exchange exchange(
      assignment.counts(), parallel_.experts, tokens, label_);
  auto rows = exchange.send(
      assignment.spread(copy_to(tokens, group, label_ + " input gradient")));
  rows = exchange.give_back(compute(rows, exchange.counts()));
  auto y = assignment.collect(
      rows, copy_to(routing.weights, group, label_ + " input gradient"));
  y = reduce_from(y, group, label_ + " sum");
  y = sharded ? scatter_to(y, group, 0, sizes, label_ + " scatter")
              : y.view(x.sizes());
  return {std::move(y), std::move(routing.losses)};
}

}  // namespace echelon::models
