// One node of the graph for all products that share an input, so that backward
// communicates once, and while there are products to compute:
//
//   tokens whole   x's gradient | all-reduce it, and the weights' gradients
//   tokens cut     gather x, and x's gradient | reduce-scatter it, and the
//                  weights' gradients
#include <torch/autograd.h>
#include <torch/types.h>

#include <optional>
#include <utility>

#include "echelon/error.h"
#include "echelon/parallel/tensor/autocast_inputs.h"
#include "echelon/parallel/tensor/linear.h"
#include "echelon/parallel/tensor/matrix_product.h"
#include "echelon/parallel/tensor/once.h"
#include "echelon/parallel/tensor/token_rows.h"
#include "echelon/profiling/operator_scope.h"

namespace echelon {
namespace {

using detail::LinearCall;
using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The flat list of an autograd function, as products.
std::vector<LinearWeights>
unflatten(at::TensorList flat, const std::vector<bool>& has_bias) {
  std::vector<LinearWeights> weights;
  size_t next = 0;
  for (const bool bias : has_bias) {
    auto& one = weights.emplace_back();
    one.weight = flat[next++];
    if (bias) one.bias = flat[next++];
  }
  return weights;
}

variable_list gathered_products(
    const Tensor& x, const std::vector<LinearWeights>& weights,
    const LinearCall& call) {
  const auto& options = call.parallel.options;
  const detail::TokenChunks chunks(
      call.tokens, call.parallel, options.overlap_chunks);
  detail::TokenGather gather(x, chunks, call.parallel, call.label + " gather");
  variable_list outputs;
  for (const auto& one : weights) {
    outputs.push_back(torch::empty(
        {call.tokens, detail::outputs_of(one.weight, call.layout)},
        x.options()));
  }
  const auto multiply = [&](const Tensor& rows, const IndexRange& range) {
    for (size_t i = 0; i < weights.size(); ++i) {
      detail::product_out(
          outputs[i].slice(0, range.begin, range.end), rows, weights[i],
          call.layout);
    }
  };
  if (chunks.plain()) {
    multiply(gather.whole(), {0, call.tokens});
    return outputs;
  }
  for (int64_t c = 0; c < chunks.count(); ++c) {
    for (int rank = 0; rank < chunks.ranks(); ++rank) {
      multiply(gather.rows(rank, c), chunks.rows(rank, c));
    }
  }
  return outputs;
}

// The gradient of the input of products, row by row where one likes.
class InputGradient {
 public:
  InputGradient(
      const variable_list& gradients, const std::vector<LinearWeights>& weights,
      WeightLayout layout)
      : layout_(layout) {
    for (size_t i = 0; i < weights.size(); ++i) {
      if (!gradients[i].defined()) continue;
      products_.emplace_back(gradients[i], weights[i].weight);
    }
  }

  void write(const Tensor& to, const IndexRange& range) const {
    for (size_t i = 0; i < products_.size(); ++i) {
      const auto& [gradient, weight] = products_[i];
      detail::input_gradient_out(
          to, gradient.slice(0, range.begin, range.end), weight, layout_,
          /*add=*/i > 0);
    }
  }

 private:
  std::vector<std::pair<Tensor, Tensor>> products_;
  WeightLayout layout_;
};

class ColumnLinear : public torch::autograd::Function<ColumnLinear> {
 public:
  static variable_list forward(
      AutogradContext* context, const Tensor& x, at::TensorList flat,
      const c10::intrusive_ptr<LinearCall>& call) {
    context->set_materialize_grads(false);
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    variable_list saved = flat.vec();
    saved.push_back(x);
    context->save_for_backward(std::move(saved));
    const auto weights = unflatten(flat, call->has_bias);
    return as_one_operator("echelon::column_linear", [&] {
      if (call->parallel.cuts_tokens()) {
        return gathered_products(x, weights, *call);
      }
      variable_list outputs;
      for (const auto& one : weights) {
        outputs.push_back(at::linear(
            x, detail::in_by_out(one.weight, call->layout).t(), one.bias));
      }
      return outputs;
    });
  }

  static variable_list
  backward(AutogradContext* context, variable_list gradients) {
    detail::refuse_second_derivative("column_linear");
    const auto capsule = context->saved_data["call"].toCapsule();
    const auto& call = static_cast<const LinearCall&>(*capsule);
    auto saved = context->get_saved_variables();
    const Tensor x = std::move(saved.back());
    saved.pop_back();
    const auto weights = unflatten(saved, call.has_bias);
    for (auto& gradient : gradients) {
      if (gradient.defined()) gradient = detail::as_rows(gradient);
    }
    Needs needs = needs_of(*context, gradients, call.has_bias);

    std::optional<detail::TokenGather> gather;
    if (call.parallel.cuts_tokens() && needs.any_weight) {
      gather.emplace(
          x, detail::TokenChunks(call.tokens, call.parallel, 1), call.parallel,
          call.label + " gather");
    }
    Sum sum;
    if (context->needs_input_grad(0)) {
      begin_sum(sum, x, InputGradient(gradients, weights, call.layout), call);
    }
    Tensor all;
    if (needs.any_weight) all = gather ? gather->whole() : detail::as_rows(x);
    gather.reset();
    variable_list results = {Tensor()};
    for (size_t i = 0; i < weights.size(); ++i) {
      results.push_back(
          needs.weight[i]
              ? detail::weight_gradient(all, gradients[i], call.layout)
              : Tensor());
      if (!call.has_bias[i]) continue;
      results.push_back(needs.bias[i] ? gradients[i].sum(0) : Tensor());
    }
    if (context->needs_input_grad(0)) results[0] = finish_sum(sum, x);
    results.emplace_back();
    return results;
  }

 private:
  // Which gradients are asked for, and exist.
  struct Needs {
    std::vector<bool> weight;
    std::vector<bool> bias;
    bool any_weight = false;
  };

  static Needs needs_of(
      const AutogradContext& context, const variable_list& gradients,
      const std::vector<bool>& has_bias) {
    Needs needs;
    size_t edge = 1;  // after x
    for (size_t i = 0; i < has_bias.size(); ++i) {
      const bool here = gradients[i].defined();
      needs.weight.push_back(context.needs_input_grad(edge++) && here);
      needs.bias.push_back(
          has_bias[i] && context.needs_input_grad(edge++) && here);
      needs.any_weight = needs.any_weight || needs.weight.back();
    }
    return needs;
  }

  // The sum of the input's gradient, on its way.
  struct Sum {
    Tensor whole;
    Work work;
    std::optional<detail::TokenReduceScatter> scatter;
  };

  static void begin_sum(
      Sum& sum, const Tensor& x, const InputGradient& own,
      const LinearCall& call) {
    const auto label = call.label + " input gradient";
    if (!call.parallel.cuts_tokens()) {
      sum.whole = torch::empty(x.sizes(), x.options());
      const auto rows = detail::as_rows(sum.whole);
      own.write(rows, {0, rows.size(0)});
      sum.work = call.parallel.group.all_reduce(
          sum.whole, ReduceOp::sum, {.label = label, .async = true});
      return;
    }
    const detail::TokenChunks chunks(
        call.tokens, call.parallel, call.parallel.options.overlap_chunks);
    auto& scatter = sum.scatter.emplace(
        x.size(-1), x.options(), chunks, call.parallel, label);
    for (int64_t c = 0; c < chunks.count(); ++c) {
      if (chunks.plain()) {
        own.write(scatter.all(), {0, call.tokens});
      } else {
        for (int rank = 0; rank < chunks.ranks(); ++rank) {
          own.write(scatter.rows(rank, c), chunks.rows(rank, c));
        }
      }
      scatter.start(c);
    }
  }

  static Tensor finish_sum(Sum& sum, const Tensor& x) {
    if (sum.scatter) return sum.scatter->finish().view(x.sizes());
    sum.work.wait();
    return sum.whole;
  }
};

void check_tokens(
    const Tensor& x, const TensorParallel& parallel, int64_t tokens,
    const std::string& label) {
  const int64_t here = parallel.part_of(tokens).size();
  if (x.dim() == 2 && x.size(0) == here) return;
  throw ConfigError(
      "[" + label + "] rank " + std::to_string(parallel.rank()) + " of " +
      std::to_string(parallel.size()) + " has " + std::to_string(here) +
      " of " + std::to_string(tokens) + " tokens, but its input has " +
      std::to_string(x.size(0)) + " rows and " + std::to_string(x.dim()) +
      " dimensions; cut tokens are [tokens_r, features]");
}

}  // namespace

std::vector<Tensor> column_linear(
    const Tensor& x, const std::vector<LinearWeights>& weights,
    WeightLayout layout, const TensorParallel& parallel, int64_t tokens,
    const std::string& label) {
  if (parallel.size() == 1) {
    std::vector<Tensor> outputs;
    for (const auto& one : weights) {
      outputs.push_back(
          at::linear(x, detail::in_by_out(one.weight, layout).t(), one.bias));
    }
    return outputs;
  }
  if (parallel.cuts_tokens()) check_tokens(x, parallel, tokens, label);
  auto call = c10::make_intrusive<LinearCall>();
  call->layout = layout;
  call->parallel = parallel;
  call->tokens = tokens;
  call->label = label;
  std::vector<Tensor> flat;
  for (const auto& one : weights) {
    flat.push_back(detail::for_product(one.weight));
    call->has_bias.push_back(one.bias.defined());
    if (one.bias.defined()) flat.push_back(detail::for_product(one.bias));
  }
  const auto input = detail::for_product(x);
  const detail::WithoutAutocast guard;
  return ColumnLinear::apply(input, at::TensorList(flat), call);
}

}  // namespace echelon
