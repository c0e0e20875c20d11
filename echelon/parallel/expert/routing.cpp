// A choice is a token and one of its k experts; choice c is of token c / k. A
// stable sort of the choices by expert gives the order of the rows. Rows are
// gathered in forward and in backward, by the order or its inverse: adding rows
// in place, as the backward of index_select does, would be slower, and on a GPU
// in no fixed order.
#include "echelon/parallel/expert/routing.h"

#include <torch/autograd.h>
#include <torch/types.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "echelon/error.h"
#include "echelon/layers/low_precision.h"
#include "echelon/layout/shard.h"

namespace echelon {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void refuse_second_derivative_of_rows() {
  if (!torch::GradMode::is_enabled()) return;
  throw Error(
      "[experts] the backward of a mixture cannot be differentiated again; "
      "call backward without create_graph");
}

// [choices, width] of choice after choice -> [tokens, k, width]
Tensor by_token(const Tensor& rows, int64_t per_token) {
  return rows.view({-1, per_token, rows.size(-1)});
}

class SpreadRows : public torch::autograd::Function<SpreadRows> {
 public:
  static Tensor forward(
      AutogradContext* context, const Tensor& x, const Tensor& order,
      const Tensor& inverse, int64_t per_token) {
    context->save_for_backward({inverse});
    context->saved_data["k"] = per_token;
    return x.index_select(
        0, per_token == 1
               ? order
               : at::div(order, per_token, /*rounding_mode=*/"floor"));
  }

  static variable_list
  backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_derivative_of_rows();
    const auto inverse = context->get_saved_variables()[0];
    const int64_t per_token = context->saved_data["k"].toInt();
    const auto rows = gradients[0].index_select(0, inverse);
    return {
        per_token == 1 ? rows : by_token(rows, per_token).sum(1), Tensor(),
        Tensor(), Tensor()};
  }
};

class CollectRows : public torch::autograd::Function<CollectRows> {
 public:
  static Tensor forward(
      AutogradContext* context, const Tensor& rows, const Tensor& weights,
      const Tensor& order, const Tensor& inverse) {
    context->save_for_backward({rows, weights, order, inverse});
    const auto own = by_token(rows.index_select(0, inverse), weights.size(1));
    return at::bmm(weights.unsqueeze(1), own).squeeze(1);
  }

  static variable_list
  backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_derivative_of_rows();
    const auto saved = context->get_saved_variables();
    const auto& [rows, weights, order, inverse] =
        std::tie(saved[0], saved[1], saved[2], saved[3]);
    const auto& gradient = gradients[0];
    Tensor for_rows, for_weights;
    if (context->needs_input_grad(0)) {
      for_rows = (gradient.unsqueeze(1) * weights.unsqueeze(2))
                     .flatten(0, 1)
                     .index_select(0, order);
    }
    if (context->needs_input_grad(1)) {
      const auto own = by_token(rows.index_select(0, inverse), weights.size(1));
      for_weights = at::bmm(own, gradient.unsqueeze(2)).squeeze(2);
    }
    return {for_rows, for_weights, Tensor(), Tensor()};
  }
};

// [samples]; see route().
Tensor losses_of(
    const Tensor& scores, const Tensor& probabilities, const Tensor& experts,
    const RoutingOptions& options, int64_t samples) {
  // There may be no sample at all.
  const int64_t length = scores.size(0) / std::max<int64_t>(1, samples);
  const auto by_sample = [&](const Tensor& tokens) {
    return tokens.view({samples, length, tokens.size(-1)});
  };
  Tensor losses;
  if (options.aux_loss > 0) {
    const auto chosen = experts.view({samples, length * options.per_token});
    const auto counts =
        torch::zeros({samples, options.experts}, probabilities.options())
            .scatter_add(
                1, chosen,
                torch::ones(chosen.sizes(), probabilities.options()));
    const double scale =
        static_cast<double>(options.experts) /
        static_cast<double>(std::max<int64_t>(1, chosen.size(1)));
    const auto means = by_sample(probabilities).mean(1);
    losses = (counts * means).sum(1) * (options.aux_loss * scale);
  }
  if (options.z_loss > 0) {
    // The logarithm of the sum; logsumexp() has no kernel that knows shapes
    // alone.
    const auto first = scores.narrow(-1, 0, 1);
    const auto squares =
        (first - at::log_softmax(scores, -1).narrow(-1, 0, 1)).square();
    const auto mean = by_sample(squares).mean(1).squeeze(1) * options.z_loss;
    losses = losses.defined() ? losses + mean : mean;
  }
  return losses;
}

// The k highest along the last dimension, the highest first; of equal ones the
// lower number comes first.
std::tuple<Tensor, Tensor> highest(const Tensor& values, int64_t k) {
  const auto [sorted, numbers] =
      values.sort(/*stable=*/true, /*dim=*/-1, /*descending=*/true);
  return {sorted.narrow(-1, 0, k), numbers.narrow(-1, 0, k)};
}

// [tokens, k]: the experts that are chosen by their values [tokens, experts].
Tensor chosen_by(const Tensor& values, const RoutingOptions& options) {
  if (options.groups == 1) {
    return std::get<1>(highest(values, options.per_token)).contiguous();
  }
  const auto grouped = values.view(
      {values.size(0), options.groups, options.experts / options.groups});
  const auto of_groups = std::get<0>(highest(grouped, 2)).sum(-1);
  const auto groups = std::get<1>(highest(of_groups, options.groups_per_token));
  const auto left_out =
      torch::ones(of_groups.sizes(), values.options().dtype(torch::kBool))
          .scatter(1, groups, false)
          .unsqueeze(-1);
  const auto left =
      grouped.masked_fill(left_out, -std::numeric_limits<double>::infinity());
  return std::get<1>(highest(left.view(values.sizes()), options.per_token))
      .contiguous();
}

}  // namespace

Routing route(
    const Tensor& scores, const RoutingOptions& options, int64_t samples,
    bool with_losses, const Tensor& bias) {
  const auto wide = for_sums(scores);
  const auto probabilities =
      options.sigmoid ? at::sigmoid(wide) : at::softmax(wide, -1);
  Routing routing;
  auto values = probabilities.detach();
  if (bias.defined()) values = values + bias.to(values.scalar_type());
  routing.experts = chosen_by(values, options);
  auto weights = probabilities.gather(-1, routing.experts);
  if (options.normalize) {
    auto sums = weights.sum(-1, /*keepdim=*/true);
    // All sigmoids may be zero.
    if (options.sigmoid) sums = sums + 1e-20;
    weights = weights / sums;
  }
  if (options.scale != 1) weights = weights * options.scale;
  routing.weights = weights.to(scores.scalar_type());
  if (with_losses && options.has_losses()) {
    const auto shares =
        options.sigmoid
            ? probabilities / (probabilities.sum(-1, /*keepdim=*/true) + 1e-20)
            : probabilities;
    routing.losses = losses_of(wide, shares, routing.experts, options, samples);
  }
  return routing;
}

// Not by bincount, which reads the largest number on the host.
Tensor loads_of(const Tensor& experts, int64_t num_experts) {
  const auto chosen = experts.reshape({-1});
  return torch::zeros({num_experts}, chosen.options())
      .scatter_add_(0, chosen, torch::ones_like(chosen));
}

Assignment::Assignment(const Tensor& experts, int64_t num_experts)
    : per_token_(experts.size(1)) {
  const torch::NoGradGuard no_grad;
  const auto flat = experts.reshape({-1});
  order_ = std::get<1>(flat.sort(
      /*stable=*/true, /*dim=*/0, /*descending=*/false));
  inverse_ = torch::empty_like(order_);
  inverse_.scatter_(0, order_, torch::arange(flat.size(0), order_.options()));
  if (flat.is_meta()) {
    for (int64_t i = 0; i < num_experts; ++i) {
      counts_.push_back(even_range(flat.size(0), i, num_experts).size());
    }
    return;
  }
  const auto counts = loads_of(flat, num_experts).to(torch::kCPU);
  const auto* numbers = counts.const_data_ptr<int64_t>();
  counts_.assign(numbers, numbers + num_experts);
}

Tensor Assignment::spread(const Tensor& x) const {
  return SpreadRows::apply(x, order_, inverse_, per_token_);
}

Tensor Assignment::collect(const Tensor& rows, const Tensor& weights) const {
  return CollectRows::apply(rows, weights, order_, inverse_);
}

Tensor
permuted(const Tensor& rows, const Tensor& order, const Tensor& inverse) {
  return SpreadRows::apply(rows, order, inverse, int64_t{1});
}

}  // namespace echelon
