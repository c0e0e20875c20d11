// A choice is a token and one of its k experts; choice c is of token c / k. A
// stable sort of the choices by expert gives the order of the rows. Rows are
// gathered in forward and in backward, by the order or its inverse: adding rows
// in place, as the backward of index_select does, would be slower, and on a GPU
// in no fixed order. Choices that were dropped have no row: those of a rank
// with a capacity are zeros where no row is copied to.
#include "echelon/parallel/expert/routing.h"

#include <torch/autograd.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
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

// [rows, width] -> [choices, width], zeros for choices without a row. An empty
// `inverse` says that there may be such.
Tensor by_choice(
    const Tensor& rows, const Tensor& order, const Tensor& inverse,
    int64_t num_choices) {
  if (inverse.size(0) == num_choices) return rows.index_select(0, inverse);
  return torch::zeros({num_choices, rows.size(1)}, rows.options())
      .index_copy_(0, order, rows);
}

// A function of autograd takes no undefined tensor.
Tensor or_empty(const Tensor& inverse, const Tensor& order) {
  return inverse.defined() ? inverse : order.narrow(0, 0, 0);
}

class SpreadRows : public torch::autograd::Function<SpreadRows> {
 public:
  static Tensor forward(
      AutogradContext* context, const Tensor& x, const Tensor& order,
      const Tensor& inverse, int64_t per_token) {
    const int64_t num_choices = x.size(0) * per_token;
    const bool whole = inverse.size(0) == num_choices;
    context->save_for_backward({whole ? inverse : order, inverse});
    context->saved_data["k"] = per_token;
    context->saved_data["choices"] = num_choices;
    return x.index_select(
        0, per_token == 1
               ? order
               : at::div(order, per_token, /*rounding_mode=*/"floor"));
  }

  static variable_list
  backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_derivative_of_rows();
    const auto saved = context->get_saved_variables();
    const int64_t per_token = context->saved_data["k"].toInt();
    const auto rows = by_choice(
        gradients[0], saved[0], saved[1],
        context->saved_data["choices"].toInt());
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
    const auto own = by_token(
        by_choice(rows, order, inverse, weights.numel()), weights.size(1));
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
      const auto own = by_token(
          by_choice(rows, order, inverse, weights.numel()), weights.size(1));
      for_weights = at::bmm(own, gradient.unsqueeze(2)).squeeze(2);
    }
    return {for_rows, for_weights, Tensor(), Tensor()};
  }
};

// The piece of a sample that each choice is of, counted over all samples: int64
// [tokens * k].
Tensor pieces_of_choices(
    const Tensor& experts, int64_t samples, const SampleParts& parts) {
  const int64_t tokens = experts.size(0);
  const int64_t length =
      std::max<int64_t>(1, tokens / std::max<int64_t>(1, samples));
  const auto numbers = torch::arange(tokens, experts.options());
  const auto sample = at::div(numbers, length, /*rounding_mode=*/"floor");
  auto pieces = sample * parts.num_pieces();
  const auto places = numbers - sample * length;
  int64_t begin = 0;
  for (int64_t i = 1; i < parts.num_pieces(); ++i) {
    begin += parts.here()[static_cast<size_t>(i - 1)].size();
    pieces = pieces + places.ge(begin);
  }
  return pieces.unsqueeze(1).expand(experts.sizes()).reshape({-1});
}

// How many tokens of each whole sample chose each expert, int64 [samples,
// experts], and Routing::earlier.
std::tuple<Tensor, Tensor> loads_of_samples(
    const Tensor& experts, int64_t num_experts, int64_t samples,
    const SampleParts& parts, const std::string& label) {
  const torch::NoGradGuard no_grad;
  const int64_t pieces = parts.num_pieces();
  const auto keys = pieces_of_choices(experts, samples, parts) * num_experts +
                    experts.reshape({-1});
  const auto own = loads_of(keys, samples * pieces * num_experts)
                       .view({samples, pieces, num_experts});
  if (!parts.is_used()) return {own.squeeze(1), Tensor()};
  const auto all = torch::empty(
      {parts.group.size(), samples, pieces, num_experts}, own.options());
  parts.group.all_gather(all, own, {.label = label + " loads"}).wait();
  std::vector<std::tuple<int64_t, int64_t, int64_t>> order;  // begin, rank, i
  for (int64_t rank = 0; rank < std::ssize(parts.pieces); ++rank) {
    for (int64_t i = 0; i < pieces; ++i) {
      const auto& ranges = parts.pieces[static_cast<size_t>(rank)];
      order.emplace_back(ranges[static_cast<size_t>(i)].begin, rank, i);
    }
  }
  std::ranges::sort(order);
  std::vector<Tensor> in_order;
  for (const auto& [begin, rank, i] : order) {
    in_order.push_back(all.select(0, rank).select(1, i));
  }
  const auto stacked = at::stack(in_order);
  const auto before = stacked.cumsum(0) - stacked;
  std::vector<Tensor> earlier(static_cast<size_t>(pieces));
  for (size_t place = 0; place < order.size(); ++place) {
    const auto& [begin, rank, i] = order[place];
    if (rank != parts.group.rank()) continue;
    earlier[static_cast<size_t>(i)] = before[static_cast<int64_t>(place)];
  }
  return {all.sum(at::IntArrayRef({0, 2})), at::stack(earlier, 1)};
}

// [samples]; see route(). `loads` int64 [samples, experts].
Tensor losses_of(
    const Tensor& scores, const Tensor& probabilities, const Tensor& loads,
    const RoutingOptions& options, int64_t samples, const SampleParts& parts) {
  // There may be no sample at all.
  const int64_t here = scores.size(0) / std::max<int64_t>(1, samples);
  const auto length =
      static_cast<double>(std::max<int64_t>(1, parts.length(here)));
  // The mean over whole samples, of which these are terms.
  const auto mean = [&](const Tensor& tokens) {
    return tokens.view({samples, here, tokens.size(-1)}).sum(1) / length;
  };
  Tensor losses;
  if (options.aux_loss > 0) {
    const double scale = static_cast<double>(options.experts) /
                         (length * static_cast<double>(options.per_token));
    losses = (loads * mean(probabilities)).sum(1) * (options.aux_loss * scale);
  }
  if (options.z_loss > 0) {
    // The logarithm of the sum; logsumexp() has no kernel that knows shapes
    // alone.
    const auto first = scores.narrow(-1, 0, 1);
    const auto squares =
        (first - at::log_softmax(scores, -1).narrow(-1, 0, 1)).square();
    const auto of_scores = mean(squares).squeeze(1) * options.z_loss;
    losses = losses.defined() ? losses + of_scores : of_scores;
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

// The expert of each choice [tokens * k]; num_experts for those beyond the
// capacity.
Tensor within_capacity(
    const Tensor& experts, int64_t num_experts, const Capacity& capacity) {
  // Sorted by piece of a sample and expert, and for each in the order of the
  // tokens.
  const auto flat = experts.reshape({-1});
  const auto numbers = torch::arange(flat.size(0), flat.options());
  const auto keys =
      pieces_of_choices(experts, capacity.samples, capacity.parts) *
          num_experts +
      flat;
  const auto [sorted, order] =
      keys.sort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
  const auto counts = loads_of(
      keys, capacity.samples * capacity.parts.num_pieces() * num_experts);
  auto begins = counts.cumsum(0) - counts;
  if (capacity.earlier.defined()) {
    begins = begins - capacity.earlier.reshape({-1});
  }
  const auto places = numbers - begins.index_select(0, sorted);
  const auto beyond =
      torch::empty(flat.sizes(), flat.options().dtype(torch::kBool))
          .scatter_(0, order, places.ge(capacity.tokens));
  return flat.masked_fill(beyond, num_experts);
}

}  // namespace

int64_t SampleParts::length(int64_t here) const {
  if (!is_used()) return here;
  int64_t sum = 0;
  for (const auto& ranges : pieces) {
    for (const auto& range : ranges) sum += range.size();
  }
  return sum;
}

Routing route(
    const Tensor& scores, const RoutingOptions& options, int64_t samples,
    bool training, const Tensor& bias, const SampleParts& parts,
    const std::string& label) {
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
  if (!training) return routing;
  Tensor loads;
  if (options.aux_loss > 0 ||
      (options.capacity_factor > 0 && parts.is_used())) {
    std::tie(loads, routing.earlier) = loads_of_samples(
        routing.experts, options.experts, samples, parts, label);
  }
  if (options.has_losses()) {
    const auto shares =
        options.sigmoid
            ? probabilities / (probabilities.sum(-1, /*keepdim=*/true) + 1e-20)
            : probabilities;
    routing.losses = losses_of(wide, shares, loads, options, samples, parts);
  }
  return routing;
}

// Not by bincount, which reads the largest number on the host.
Tensor loads_of(const Tensor& experts, int64_t num_experts) {
  const auto chosen = experts.reshape({-1});
  return torch::zeros({num_experts}, chosen.options())
      .scatter_add_(0, chosen, torch::ones_like(chosen));
}

int64_t capacity_tokens(int64_t tokens, const RoutingOptions& options) {
  const double mean = static_cast<double>(tokens * options.per_token) /
                      static_cast<double>(options.experts);
  // 1.1 * 10 is a little above 11.
  return static_cast<int64_t>(
      std::ceil(options.capacity_factor * mean * (1 - 1e-12)));
}

Assignment::Assignment(
    const Tensor& experts, int64_t num_experts,
    const std::optional<Capacity>& capacity)
    : per_token_(experts.size(1)), counts_(std::vector<int64_t>{}) {
  const torch::NoGradGuard no_grad;
  auto flat = experts.reshape({-1});
  loads_ = loads_of(flat, num_experts);
  auto kept = loads_;
  if (capacity) {
    flat = within_capacity(experts, num_experts, *capacity);
    kept = loads_of(flat, num_experts + 1).narrow(0, 0, num_experts);
    dropped_ = loads_ - kept;
  }
  order_ = std::get<1>(flat.sort(
      /*stable=*/true, /*dim=*/0, /*descending=*/false));
  if (flat.is_meta()) {
    std::vector<int64_t> counts;
    for (int64_t i = 0; i < num_experts; ++i) {
      const int64_t even = even_range(flat.size(0), i, num_experts).size();
      counts.push_back(
          capacity ? std::min(even, capacity->samples * capacity->tokens)
                   : even);
    }
    counts_ = RowCounts(std::move(counts));
  } else {
    counts_ = RowCounts(kept);
  }
  if (capacity) {
    const auto& counts = counts_.on_host();
    order_ = order_.narrow(
        0, 0, std::accumulate(counts.begin(), counts.end(), int64_t{0}));
    return;
  }
  inverse_ = torch::empty_like(order_);
  inverse_.scatter_(0, order_, torch::arange(order_.size(0), order_.options()));
}

Tensor Assignment::spread(const Tensor& x) const {
  return SpreadRows::apply(x, order_, or_empty(inverse_, order_), per_token_);
}

Tensor Assignment::collect(const Tensor& rows, const Tensor& weights) const {
  return CollectRows::apply(rows, weights, order_, or_empty(inverse_, order_));
}

Tensor
permuted(const Tensor& rows, const Tensor& order, const Tensor& inverse) {
  return SpreadRows::apply(rows, order, inverse, int64_t{1});
}

}  // namespace echelon
