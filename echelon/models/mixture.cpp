// With sharded tokens, the ranks of a tensor-parallel group first gather them,
// and each routes them all alike. What the experts compute is then a partial
// sum on each rank, of its inner features. So tokens and weights enter the
// experts by copy_to, whose backward sums their gradients over the ranks, and
// the result leaves by reduce_from.
#include "echelon/models/mixture.h"

#include <torch/nn/module.h>
#include <torch/types.h>

#include <algorithm>
#include <utility>

#include "echelon/comm/differentiable.h"
#include "echelon/layers/low_precision.h"
#include "echelon/memory/recompute.h"
#include "echelon/parallel/expert/exchange.h"
#include "echelon/parallel/expert/grouped_linear.h"
#include "echelon/parallel/tensor/linear.h"
#include "echelon/parallel/tensor/mlp.h"

namespace echelon::models {
namespace {

using torch::Tensor;

// Which tokens of samples of `sequence` tokens each rank has.
SampleParts parts_of(const ContextParallel& context, int64_t sequence) {
  SampleParts parts;
  if (!context.is_used()) return parts;
  parts.group = context.group;
  for (int rank = 0; rank < context.size(); ++rank) {
    parts.pieces.push_back(context.pieces_of(sequence, rank));
  }
  return parts;
}

// One for each router, int64 [routers, experts].
Tensor stacked(
    const std::vector<std::shared_ptr<Router>>& routers,
    Tensor Router::*numbers, torch::Device device) {
  std::vector<Tensor> all;
  for (const auto& router : routers) {
    auto& own = (*router).*numbers;
    all.push_back(
        own.defined() ? own.to(device, /*non_blocking=*/true)
                      : torch::zeros(
                            {router->weight.size(0)},
                            torch::dtype(torch::kInt64).device(device)));
    own = Tensor();
  }
  return at::stack(all);
}

}  // namespace

// A matrix [out, in] of an expert. What the ranks of a tensor-parallel group
// compute with one that is sharded by its inputs are terms of a sum, and so
// they are with its adapter.
class ExpertMatrix : public AdaptedLinear {
 public:
  // Sharded along `dim`.
  ExpertMatrix(
      int64_t out, int64_t in, int64_t dim, const TensorParallel& parallel)
      : parallel_(parallel),
        out_(out),
        in_(in),
        dim_(dim),
        weight_(register_shard(
            "weight",
            {even_shard({out, in}, dim, parallel.rank(), parallel.size())})) {}

  void add_adapter(int64_t rank, double scale) override {
    if (dim_ == 0) {
      adapt_outputs(out_, in_, rank, scale, parallel_);
    } else {
      adapt_inputs(out_, in_, rank, scale, parallel_, parallel_.size() > 1);
    }
  }

  const Tensor& weight() const { return weight_; }
  // `share` multiplies the gradients of parameters.
  Tensor times(const Tensor& rows, double share) const {
    const auto product = [&](const Tensor& x, const Tensor& parameter) {
      return at::linear(x, with_scaled_gradient(parameter, share));
    };
    const auto y = product(rows, weight_);
    if (!has_adapter()) return y;
    return y + product(product(rows, a_) * scale_, b_);
  }

 private:
  TensorParallel parallel_;
  int64_t out_, in_, dim_;
  Tensor weight_;
};

Router::Router(const LanguageModelShape& shape, std::string name)
    : mixture(std::move(name)),
      weight(register_parameter(
          "weight", torch::empty({shape.experts, shape.hidden_size}))) {
  if (!shape.kind->biased_router) return;
  bias =
      register_buffer("e_score_correction_bias", torch::zeros({shape.experts}));
  rate = shape.bias_rate;
}

void Router::count(const Tensor& more, const Tensor& more_dropped) {
  const bool counts = is_training() && at::GradMode::is_enabled() &&
                      !more.is_meta() && !recomputing();
  if (!counts) return;
  const torch::NoGradGuard no_grad;
  const auto add = [](Tensor& sum, const Tensor& term) {
    if (term.defined()) sum = sum.defined() ? sum + term : term;
  };
  add(loads, more);
  add(dropped, more_dropped);
}

RouterSteps::RouterSteps(
    const std::vector<std::shared_ptr<torch::nn::Module>>& networks,
    const std::optional<LanguageModelShape>& shape, Group data,
    torch::Device device)
    : data_(std::move(data)), device_(device) {
  for (const auto& network : networks) {
    for (const auto& module : network->modules()) {
      auto router = std::dynamic_pointer_cast<Router>(module);
      if (router) routers_.push_back(std::move(router));
    }
  }
  if (!shape) return;
  const auto names = mixture_names(*shape);
  std::vector<int64_t> places;
  for (const auto& router : routers_) {
    const auto name = std::ranges::find(names, router->mixture);
    if (name == names.end()) return;  // of another model
    places.push_back(name - names.begin());
  }
  mixtures_ = std::ssize(names);
  experts_ = shape->experts;
  places_ = torch::tensor(places, torch::kInt64).to(device_);
}

void RouterSteps::finish() {
  const torch::NoGradGuard no_grad;
  Tensor loads, dropped;
  if (!routers_.empty()) {
    loads = stacked(routers_, &Router::loads, device_);
    dropped = stacked(routers_, &Router::dropped, device_);
    if (routers_.front()->rate > 0) balance(loads);
  }
  if (mixtures_ > 0) counts_ = whole_model(loads, dropped);
}

Tensor
RouterSteps::whole_model(const Tensor& loads, const Tensor& dropped) const {
  const auto all = torch::zeros(
      {2, mixtures_, experts_}, torch::dtype(torch::kInt64).device(device_));
  if (!routers_.empty()) {
    all.index_copy_(1, places_, at::stack({loads, dropped}));
  }
  return all;
}

void RouterSteps::balance(const Tensor& loads) const {
  const auto all = loads.clone();
  data_.all_reduce(all, ReduceOp::sum, {.label = "expert loads"}).wait();
  // Whole numbers: which loads are above the mean is the same on all ranks.
  const auto below = at::sign(all.sum(1, /*keepdim=*/true) - all * all.size(1));
  for (size_t i = 0; i < routers_.size(); ++i) {
    auto& router = *routers_[i];
    router.bias.add_(
        below[static_cast<int64_t>(i)].to(router.bias.options()), router.rate);
  }
}

MixtureOfExperts::MixtureOfExperts(
    const LanguageModelShape& shape, TensorParallel parallel, std::string label)
    : parallel_(std::move(parallel)),
      label_(std::move(label)),
      routing_{
          .experts = shape.experts,
          .per_token = shape.experts_per_token,
          .normalize = shape.normalize_routing,
          .sigmoid = shape.kind->biased_router,
          .groups = shape.expert_groups,
          .groups_per_token = shape.groups_per_token,
          .scale = shape.routing_scale,
          .aux_loss = shape.aux_loss,
          .z_loss = shape.z_loss,
          .capacity_factor = shape.capacity_factor} {
  const auto& names = shape.kind->experts;
  const int64_t hidden = shape.hidden_size;
  const int64_t inner = shape.expert_size;
  router_ = register_module("gate", std::make_shared<Router>(shape, label_));
  const auto list =
      register_module("experts", std::make_shared<torch::nn::Module>());
  const auto own = experts_of(shape.experts, parallel_.experts);
  for (int64_t i = own.begin; i < own.end; ++i) {
    const auto expert = list->register_module(
        std::to_string(i), std::make_shared<torch::nn::Module>());
    const auto add = [&](const char* name, int64_t out, int64_t in,
                         int64_t dim) {
      return expert->register_module(
          name, std::make_shared<ExpertMatrix>(out, in, dim, parallel_));
    };
    experts_.push_back(
        {.gate = add(names.gate, inner, hidden, 0),
         .up = add(names.up, inner, hidden, 0),
         .down = add(names.down, hidden, inner, 1)});
  }
  if (shape.shared_experts == 0) return;
  shared_ = register_module(
      "shared_experts", std::make_shared<GatedMlp>(
                            MlpShape{
                                .hidden = hidden,
                                .intermediate = shape.shared_experts * inner,
                                .bias = false},
                            parallel_, label_ + ".shared_experts"));
}

// Experts without rows have gradients of zeros.
Tensor
MixtureOfExperts::compute(const Tensor& rows, const RowCounts& counts) const {
  const double share = 1.0 / parallel_.experts.size();
  if (std::ranges::any_of(experts_, [](const Expert& one) {
        return one.gate->has_adapter() || one.up->has_adapter() ||
               one.down->has_adapter();
      })) {
    return compute_each(rows, counts, share);
  }
  std::vector<Tensor> gates, ups, both, downs;
  for (const auto& [gate, up, down] : experts_) {
    gates.push_back(gate->weight());
    ups.push_back(up->weight());
    downs.push_back(down->weight());
    const auto one = joined({{gates.back(), {}}, {ups.back(), {}}});
    if (one) both.push_back(one->weight);
  }
  const auto times = [&](const std::vector<Tensor>& weights) {
    return grouped_linear(rows, counts, weights, share);
  };
  Tensor inner;
  if (both.size() == experts_.size()) {
    const int64_t width = gates[0].size(0);
    const auto parts = split_features(times(both), {width, width});
    inner = silu_times(parts[0], parts[1]);
  } else {
    inner = silu_times(times(gates), times(ups));
  }
  return grouped_linear(inner, counts, downs, share);
}

// Computes one expert after the other, with their adapters.
Tensor MixtureOfExperts::compute_each(
    const Tensor& rows, const RowCounts& counts, double share) const {
  std::vector<Tensor> results;
  int64_t begin = 0;
  for (size_t i = 0; i < experts_.size(); ++i) {
    const int64_t count = counts.on_host()[i];
    const auto own = rows.narrow(0, begin, count);
    begin += count;
    const auto& [gate, up, down] = experts_[i];
    results.push_back(down->times(
        silu_times(gate->times(own, share), up->times(own, share)), share));
  }
  return at::cat(results);
}

MixtureOfExperts::Result
MixtureOfExperts::forward(const Tensor& x, int64_t batch, int64_t sequence) {
  const auto& group = parallel_.group;
  const bool sharded = parallel_.splits_tokens();
  const int64_t here = batch * parallel_.context.length_of(sequence);
  const auto sizes = even_split(here, group.size());
  const auto tokens = sharded
                          ? gather_from(x, group, 0, sizes, label_ + " gather")
                          : x.reshape({here, x.size(-1)});
  const auto parts = parts_of(parallel_.context, sequence);
  // Sigmoids of 16 bits would often be equal.
  auto routing = route(
      routing_.sigmoid ? at::linear(for_sums(tokens), for_sums(router_->weight))
                       : at::linear(tokens, router_->weight),
      routing_, batch, is_training(), router_->bias, parts, label_);
  routing.weights = routing.weights.to(tokens.scalar_type());
  std::optional<Capacity> capacity;
  if (routing_.capacity_factor > 0 && is_training()) {
    capacity = {
        .samples = batch,
        .tokens = capacity_tokens(sequence, routing_),
        .parts = parts,
        .earlier = routing.earlier};
  }
  const Assignment assignment(routing.experts, routing_.experts, capacity);
  router_->count(assignment.loads(), assignment.dropped());
  Exchange exchange(assignment.counts(), parallel_.experts, tokens, label_);
  // They keep the device busy while the host learns how many rows there are.
  Tensor shared;
  if (shared_) shared = shared_->forward(x, here);
  exchange.settle();
  auto rows = exchange.send(
      assignment.spread(copy_to(tokens, group, label_ + " input gradient")));
  rows = exchange.give_back(compute(rows, exchange.counts()));
  auto y = assignment.collect(
      rows, copy_to(routing.weights, group, label_ + " input gradient"));
  y = reduce_from(y, group, label_ + " sum");
  y = sharded ? scatter_to(y, group, 0, sizes, label_ + " scatter")
              : y.view(x.sizes());
  if (shared.defined()) y = y + shared;
  return {std::move(y), std::move(routing.losses)};
}

}  // namespace echelon::models
