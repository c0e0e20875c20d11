// A column-parallel matmul is one node of the autograd graph for all weights
// that share an input, so backward communicates once, while it has gradients to
// compute:
//
//   replicated input  x's gradient | all-reduce it, and compute the weights'
//   sharded tokens    all-gather x, and compute x's gradient |
//                     reduce-scatter it, and compute the weights'
//
// What no other matmul hides runs in options.overlap_chunks chunks, of which
// one is communicated while another is computed: a column-parallel matmul of
// sharded tokens, a row-parallel one, and its input's gradient. So does the
// gradient of a column-parallel input where no weight needs one.
//
// Weights that share an input and lie one after the other in memory are one
// matrix, so that one matmul takes the place of several. Parameters, their
// names and their gradients stay what they are: views of the matrix.
//
// The gradient of a weight is written where its owner keeps gradients
// (parameter_owner.h), so that it is not copied there.
//
// With parallel.fp8 each matrix is rounded to 8 bits once in a pass and then
// used for all of its products (fp8.h); a chunk that arrives from other ranks
// has a scale of its own.
#include "echelon/parallel/tensor/linear.h"

#include <torch/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/types.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>

#include "echelon/error.h"
#include "echelon/layers/graph_node.h"
#include "echelon/layers/low_precision.h"
#include "echelon/layers/parameter_owner.h"
#include "echelon/parallel/tensor/autograd_support.h"
#include "echelon/parallel/tensor/fp8.h"
#include "echelon/parallel/tensor/token_rows.h"
#include "echelon/profiling/operator_scope.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using detail::Factor;
using detail::TokenRows;
using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// ------------------------------------------------------------------- matmuls

// x [..., features] as [rows, features].
Tensor as_rows(const Tensor& x) {
  if (x.dim() == 2) return x;
  return x.dim() == 1 ? x.unsqueeze(0) : x.flatten(0, -2);
}

// The sizes of `like` with another number of features.
std::vector<int64_t> with_features(const Tensor& like, int64_t features) {
  auto sizes = like.sizes().vec();
  sizes.back() = features;
  return sizes;
}

// The weight as a matrix [in, out]: a view.
Tensor in_by_out(const Tensor& weight, WeightLayout layout) {
  return layout == WeightLayout::in_out ? weight : weight.t();
}

int64_t outputs_of(const Tensor& weight, WeightLayout layout) {
  return weight.size(layout == WeightLayout::in_out ? 1 : 0);
}

// Weights and activations as factors of products.
Factor on_the_left(const Tensor& matrix, bool fp8) {
  return {matrix, Factor::Of::forward, fp8, {.left = true}};
}
Factor on_the_right(const Tensor& matrix, bool fp8) {
  return {matrix, Factor::Of::forward, fp8, {.left = false, .right = true}};
}

// The gradient of an output, which is on the left of the product with the
// weight, and on either side of that with the input.
Factor gradient_factor(const Tensor& matrix, bool fp8) {
  return {matrix, Factor::Of::gradient, fp8, {.left = true, .right = true}};
}

// Where the gradient of `weight` is written, given the input.
Tensor gradient_memory(const Tensor& weight, const Tensor& x) {
  Tensor memory;
  if (weight.scalar_type() == x.scalar_type()) {
    const auto owner = parameter_owner_of(weight);
    if (owner) memory = owner->gradient_of(weight);
  }
  return memory.defined() ? memory : torch::empty(weight.sizes(), x.options());
}

// The node of a matmul on one rank: that of at::linear, but for the memory of
// the weight's gradient. It saves its tensors before the matmul runs, as those
// of LibTorch do, so that recomputing a layer ends before the last matmul.
struct PlainLinear : torch::autograd::Node {
  PlainLinear(const Tensor& x, const LinearWeights& all, WeightLayout layout)
      : Node(torch::autograd::collect_next_edges(x, all.weight, all.bias)),
        x_(x, false),
        place_(all.weight.detach()),
        layout_(layout) {
    if (x.requires_grad()) weight_ = {all.weight, false};
  }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard lock(mutex_);
    variable_list results(3);
    if (!gradients[0].defined()) return results;
    const Tensor x = x_.unpack();
    const Tensor rows = as_rows(x), gradient = as_rows(gradients[0]);
    if (task_should_compute_output(0)) {
      const auto back = in_by_out(weight_.unpack(), layout_).t();
      results[0] = gradient.mm(back).view(x.sizes());
    }
    if (task_should_compute_output(1)) {
      const bool in_first = layout_ == WeightLayout::in_out;
      const auto left = in_first ? rows.t() : gradient.t();
      const auto& right = in_first ? gradient : rows;
      if (torch::GradMode::is_enabled()) {  // a second derivative may come
        results[1] = left.mm(right);
      } else {
        results[1] = gradient_memory(place_, x);
        at::mm_out(results[1], left, right);
      }
    }
    if (task_should_compute_output(2)) results[2] = gradient.sum(0);
    return results;
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    x_.reset_data();
    weight_.reset_data();
  }

 private:
  torch::autograd::SavedVariable x_;
  torch::autograd::SavedVariable weight_;  // for x's gradient
  Tensor place_;  // the weight, whose values may not be there any more
  WeightLayout layout_;
};

bool has_gradient_memory(const Tensor& weight, const Tensor& x) {
  return torch::GradMode::is_enabled() && weight.requires_grad() &&
         weight.scalar_type() == x.scalar_type() &&
         parameter_owner_of(weight) && cast_for_matmul(weight).is_same(weight);
}

// x times a weight [in, out], plus its bias: at::linear without history.
Tensor linear_without_history(
    const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto rows = as_rows(x);
  const auto y =
      bias.defined() ? at::addmm(bias, rows, weight) : at::mm(rows, weight);
  return y.view(with_features(x, weight.size(1)));
}

// x times each weight, plus its bias.
variable_list plain_linear(
    const Tensor& x, const std::vector<LinearWeights>& weights,
    WeightLayout layout) {
  variable_list outputs;
  for (const auto& one : weights) {
    const auto matrix = in_by_out(one.weight, layout);
    if (!has_gradient_memory(one.weight, x)) {
      outputs.push_back(at::linear(x, matrix.t(), one.bias));
      continue;
    }
    auto node = make_node<PlainLinear>(x, one, layout);
    outputs.push_back(linear_without_history(x, matrix, one.bias));
    torch::autograd::set_history(outputs.back(), node);
  }
  return outputs;
}

// What the autograd functions save besides tensors.
struct LinearCall : torch::CustomClassHolder {
  WeightLayout layout = WeightLayout::out_in;
  TensorParallel parallel;
  int64_t tokens = 0;
  std::string label;
  std::vector<bool> has_bias;  // by weight
};

// The gradient, which has the layout of the weight, given x and the gradient of
// y.
Tensor weight_gradient(
    const Tensor& weight, const Tensor& x, const Factor& y,
    const LinearCall& call) {
  const Factor input = on_the_right(x, call.parallel.fp8);
  const bool in_first = call.layout == WeightLayout::in_out;
  const Factor left = in_first ? input.t() : y.t();
  const Factor& right = in_first ? y : input;
  auto result = gradient_memory(weight, x);
  Factor::multiply(result, left, right);
  return result;
}

// ----------------------------------------------------------- column parallel

// The weights and biases in the flat list of an autograd function.
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

// The matrices [in, out] of weights, as the right-hand factors of forward.
std::vector<Factor>
factors_of(const std::vector<LinearWeights>& weights, const LinearCall& call) {
  std::vector<Factor> factors;
  for (const auto& one : weights) {
    factors.push_back(
        on_the_right(in_by_out(one.weight, call.layout), call.parallel.fp8));
  }
  return factors;
}

variable_list local_matmuls(
    const Tensor& x, const std::vector<LinearWeights>& weights,
    const LinearCall& call) {
  if (!call.parallel.fp8) return plain_linear(x, weights, call.layout);
  const auto rows = as_rows(x);
  const Factor input = on_the_left(rows, true);
  const auto factors = factors_of(weights, call);
  variable_list outputs;
  for (size_t i = 0; i < weights.size(); ++i) {
    auto y = torch::empty({rows.size(0), factors[i].columns()}, x.options());
    Factor::multiply(y, input, factors[i], weights[i].bias);
    outputs.push_back(y.view(with_features(x, y.size(1))));
  }
  return outputs;
}

variable_list gathered_matmuls(
    const Tensor& x, const std::vector<LinearWeights>& weights,
    const LinearCall& call) {
  const auto factors = factors_of(weights, call);
  const detail::TokenChunks chunks(
      call.tokens, call.parallel, call.parallel.chunks());
  detail::TokenGather gather(x, chunks, call.parallel, call.label + " gather");
  variable_list outputs;
  for (const auto& one : weights) {
    outputs.push_back(torch::empty(
        {call.tokens, outputs_of(one.weight, call.layout)}, x.options()));
  }
  gather.for_each([&](const Tensor& rows, const TokenRows& place) {
    const Factor input = on_the_left(rows, call.parallel.fp8);
    for (size_t i = 0; i < weights.size(); ++i) {
      Factor::multiply(
          place.of(outputs[i]), input, factors[i], weights[i].bias);
    }
  });
  return outputs;
}

// The weight [out, in] that gradients of outputs are multiplied by.
Factor back_factor(const Tensor& weight, const LinearCall& call) {
  return on_the_right(in_by_out(weight, call.layout).t(), call.parallel.fp8);
}

// Computes the gradient of the shared input, for any range of its rows.
class InputGradient {
 public:
  /// `gradients`: those of the outputs; none where an output has none.
  InputGradient(
      const std::vector<std::optional<Factor>>& gradients,
      const std::vector<LinearWeights>& weights, const LinearCall& call) {
    for (size_t i = 0; i < weights.size(); ++i) {
      if (!gradients[i]) continue;
      products_.emplace_back(
          *gradients[i], back_factor(weights[i].weight, call));
    }
  }

  void write(const Tensor& to, const TokenRows& place) const {
    for (size_t i = 0; i < products_.size(); ++i) {
      const auto& [gradient, weight] = products_[i];
      const auto rows = gradient.rows(place);
      i == 0 ? Factor::multiply(to, rows, weight)
             : Factor::multiply_add(to, rows, weight);
    }
  }

 private:
  std::vector<std::pair<Factor, Factor>> products_;
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
    return profiling::as_one_operator("echelon::column_linear", [&] {
      if (call->parallel.splits_tokens()) {
        return gathered_matmuls(x, weights, *call);
      }
      return local_matmuls(x, weights, *call);
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
      if (gradient.defined()) gradient = as_rows(gradient);
    }
    Needs needs = needs_of(*context, gradients, call.has_bias);
    std::vector<std::optional<Factor>> factors;
    for (const auto& gradient : gradients) {
      factors.emplace_back();
      if (gradient.defined()) {
        factors.back() = gradient_factor(gradient, call.parallel.fp8);
      }
    }

    std::optional<detail::TokenGather> gather;
    if (call.parallel.splits_tokens() && needs.any_weight) {
      gather.emplace(
          x, detail::TokenChunks(call.tokens, call.parallel, 1), call.parallel,
          call.label + " gather");
    }
    Sum sum;
    if (context->needs_input_grad(0)) {
      // Products of the weights' gradients hide the sum as a whole.
      const int64_t chunks = needs.any_weight ? 1 : call.parallel.chunks();
      begin_sum(sum, x, InputGradient(factors, weights, call), call, chunks);
    }
    Tensor all;
    if (needs.any_weight) all = gather ? gather->all_tokens() : as_rows(x);
    gather.reset();
    variable_list results = {Tensor()};
    for (size_t i = 0; i < weights.size(); ++i) {
      results.push_back(
          needs.weight[i]
              ? weight_gradient(weights[i].weight, all, *factors[i], call)
              : Tensor());
      if (!call.has_bias[i]) continue;
      results.push_back(needs.bias[i] ? gradients[i].sum(0) : Tensor());
    }
    if (context->needs_input_grad(0)) results[0] = finish_sum(sum, x);
    results.emplace_back();
    return results;
  }

 private:
  // Tells which gradients are required and available.
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

  // The sum of the input's gradient in progress.
  struct Sum {
    Tensor total;
    Work work;
    std::optional<detail::TokenReduceScatter> scatter;
  };

  static void begin_sum(
      Sum& sum, const Tensor& x, const InputGradient& own,
      const LinearCall& call, int64_t most_chunks) {
    const auto label = call.label + " input gradient";
    if (!call.parallel.splits_tokens()) {
      sum.total = torch::empty(x.sizes(), x.options());
      const auto rows = as_rows(sum.total);
      own.write(rows, {{0, rows.size(0)}});
      sum.work = call.parallel.group.all_reduce(
          sum.total, ReduceOp::sum, {.label = label, .async = true});
      return;
    }
    const detail::TokenChunks chunks(call.tokens, call.parallel, most_chunks);
    auto& scatter = sum.scatter.emplace(
        x.size(-1), x.options(), chunks, call.parallel, label);
    scatter.fill([&](const Tensor& rows, const TokenRows& place) {
      own.write(rows, place);
    });
  }

  static Tensor finish_sum(Sum& sum, const Tensor& x) {
    if (sum.scatter) return sum.scatter->finish().view(x.sizes());
    sum.work.wait();
    return sum.total;
  }
};

void check_tokens(
    const Tensor& x, const TensorParallel& parallel, int64_t tokens,
    const std::string& label) {
  const int64_t here = parallel.part_of(tokens).size();
  if (x.dim() == 2 && x.size(0) == here) return;
  throw ConfigError(format(
      "[{}] rank {} of {} has {} of {} tokens, but its input has {} rows and "
      "{} dimensions; sharded tokens are [tokens_r, features]",
      label, parallel.rank(), parallel.size(), here, tokens, x.size(0),
      x.dim()));
}

// -------------------------------------------------------------- row parallel

Tensor
reduced_matmul(const Tensor& x, const Tensor& weight, const LinearCall& call) {
  const int64_t rows = x.size(0);
  const int64_t chunks = std::clamp<int64_t>(
      call.parallel.chunks(), 1, std::max<int64_t>(1, rows));
  auto sum = torch::empty({rows, outputs_of(weight, call.layout)}, x.options());
  const Factor input = on_the_left(x, call.parallel.fp8);
  const Factor factor = factors_of({{weight, {}}}, call)[0];
  std::vector<Work> works;
  for (int64_t c = 0; c < chunks; ++c) {
    const auto range = even_range(rows, c, chunks);
    const auto part = sum.slice(0, range.begin, range.end);
    Factor::multiply(part, input.rows({range}), factor);
    works.push_back(call.parallel.group.all_reduce(
        part, ReduceOp::sum,
        {.label = call.label + " sum", .async = c + 1 < chunks}));
  }
  for (const auto& work : works) work.wait();
  return sum;
}

Tensor scattered_matmul(
    const Tensor& x, const Tensor& weight, const LinearCall& call) {
  const detail::TokenChunks chunks(
      x.size(0), call.parallel, call.parallel.chunks());
  detail::TokenReduceScatter scatter(
      outputs_of(weight, call.layout), x.options(), chunks, call.parallel,
      call.label + " scatter");
  const Factor input = on_the_left(x, call.parallel.fp8);
  const Factor factor = factors_of({{weight, {}}}, call)[0];
  scatter.fill([&](const Tensor& to, const TokenRows& place) {
    Factor::multiply(to, input.rows(place), factor);
  });
  return scatter.finish();
}

class RowLinear : public torch::autograd::Function<RowLinear> {
 public:
  // `flat`: the weight, and the bias if there is one.
  static Tensor forward(
      AutogradContext* context, const Tensor& x, at::TensorList flat,
      const c10::intrusive_ptr<LinearCall>& call) {
    context->save_for_backward({x, flat[0]});
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    const auto rows = as_rows(x);
    const bool sharded = call->parallel.splits_tokens();
    const auto sum = profiling::as_one_operator("echelon::row_linear", [&] {
      auto all = sharded ? scattered_matmul(rows, flat[0], *call)
                         : reduced_matmul(rows, flat[0], *call);
      if (flat.size() > 1) all.add_(flat[1]);
      return variable_list{all};
    })[0];
    return sharded ? sum : sum.view(with_features(x, sum.size(1)));
  }

  static variable_list
  backward(AutogradContext* context, const variable_list& gradients) {
    detail::refuse_second_derivative("row_linear");
    const auto capsule = context->saved_data["call"].toCapsule();
    const auto& call = static_cast<const LinearCall&>(*capsule);
    const auto saved = context->get_saved_variables();
    const auto& x = saved[0];
    const auto& weight = saved[1];
    const auto rows = as_rows(x);
    const auto gradient = as_rows(gradients[0]);
    const bool for_x = context->needs_input_grad(0);
    const bool for_weight = context->needs_input_grad(1);

    std::optional<detail::TokenGather> gather;
    const detail::TokenChunks chunks(
        rows.size(0), call.parallel, call.parallel.chunks());
    if (call.parallel.splits_tokens() && (for_x || for_weight)) {
      gather.emplace(gradient, chunks, call.parallel, call.label + " gather");
    }
    variable_list results = {Tensor(), Tensor()};
    if (call.has_bias[0]) {
      results.push_back(
          context->needs_input_grad(2) ? gradient.sum(0) : Tensor());
    }
    const auto factor_of = [&](const Tensor& part) {
      return gradient_factor(part, call.parallel.fp8);
    };
    std::optional<Factor> whole;
    if (!gather) whole.emplace(factor_of(gradient));
    if (for_x) {
      results[0] = torch::empty(x.sizes(), x.options());
      const auto to = as_rows(results[0]);
      const auto back = back_factor(weight, call);
      if (gather) {
        gather->for_each([&](const Tensor& from, const TokenRows& place) {
          Factor::multiply(place.of(to), factor_of(from), back);
        });
      } else {
        Factor::multiply(to, *whole, back);
      }
    }
    if (for_weight && gather) {
      // The sum over tokens may take them in the order of the chunks. The
      // narrower of the two matrices is copied to the order of the other.
      const bool reorder = chunks.even() && rows.size(1) < gradient.size(1);
      const auto input = reorder ? chunks.reordered(rows) : rows;
      whole.emplace(
          factor_of(reorder ? gather->by_chunks() : gather->all_tokens()));
      results[1] = weight_gradient(weight, input, *whole, call);
    } else if (for_weight) {
      results[1] = weight_gradient(weight, rows, *whole, call);
    }
    results.emplace_back();
    return results;
  }
};

// ------------------------------------------------------------ joined weights

// Tensors that lie one after the other, as one.
class Joined : public torch::autograd::Function<Joined> {
 public:
  static Tensor forward(AutogradContext* context, at::TensorList parts) {
    std::vector<int64_t> sizes;
    for (const auto& part : parts) sizes.push_back(part.size(0));
    context->saved_data["sizes"] = sizes;
    Tensor whole = detail::side_by_side(parts, 0);
    // Autograd notices a change of the first part in place, for all parts.
    torch::autograd::impl::set_version_counter(
        whole, torch::autograd::impl::version_counter(parts[0]));
    return whole;
  }

  static variable_list
  backward(AutogradContext* context, const variable_list& gradients) {
    return gradients[0].split_with_sizes(
        context->saved_data["sizes"].toIntVector(), 0);
  }
};

class SplitFeatures : public torch::autograd::Function<SplitFeatures> {
 public:
  static variable_list forward(
      AutogradContext* context, const Tensor& x, std::vector<int64_t> sizes) {
    auto parts = detail::parts_of(x, sizes, -1);
    context->saved_data["sizes"] = std::move(sizes);
    return parts;
  }

  static variable_list
  backward(AutogradContext* context, const variable_list& gradients) {
    Tensor whole;
    if (!torch::GradMode::is_enabled()) {
      whole = detail::side_by_side(gradients, -1);
    }
    if (!whole.defined()) whole = at::cat(gradients, -1);
    return {whole, Tensor()};
  }
};

}  // namespace

std::vector<Tensor> column_linear(
    const Tensor& x, const std::vector<LinearWeights>& weights,
    WeightLayout layout, const TensorParallel& parallel, int64_t tokens,
    const std::string& label) {
  if (parallel.size() == 1 && !parallel.fp8) {
    return plain_linear(x, weights, layout);
  }
  if (parallel.splits_tokens()) check_tokens(x, parallel, tokens, label);
  auto call = c10::make_intrusive<LinearCall>();
  call->layout = layout;
  call->parallel = parallel;
  call->tokens = tokens;
  call->label = label;
  std::vector<Tensor> flat;
  for (const auto& one : weights) {
    flat.push_back(cast_for_matmul(one.weight));
    call->has_bias.push_back(one.bias.defined());
    if (one.bias.defined()) flat.push_back(cast_for_matmul(one.bias));
  }
  const auto input = cast_for_matmul(x);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  return ColumnLinear::apply(input, at::TensorList(flat), call);
}

std::optional<LinearWeights> joined(const std::vector<LinearWeights>& weights) {
  const auto join = [](const std::vector<Tensor>& parts) -> Tensor {
    const bool alike = std::ranges::all_of(parts, [&](const Tensor& part) {
      return part.defined() && part.requires_grad() == parts[0].requires_grad();
    });
    if (!alike || !detail::side_by_side(parts, 0).defined()) return {};
    return Joined::apply(at::TensorList(parts));
  };
  std::vector<Tensor> matrices, biases;
  for (const auto& one : weights) {
    if (!one.weight.is_contiguous()) return std::nullopt;
    matrices.push_back(one.weight);
    if (one.bias.defined()) biases.push_back(one.bias);
  }
  LinearWeights result;
  if (!biases.empty()) {
    if (biases.size() != matrices.size()) return std::nullopt;
    result.bias = join(biases);
    if (!result.bias.defined()) return std::nullopt;
  }
  result.weight = join(matrices);
  if (!result.weight.defined()) return std::nullopt;
  return result;
}

std::vector<Tensor> split_features(const Tensor& x, at::IntArrayRef sizes) {
  return SplitFeatures::apply(x, sizes.vec());
}

Tensor row_linear(
    const Tensor& x, const Tensor& weight, const Tensor& bias,
    WeightLayout layout, const TensorParallel& parallel,
    const std::string& label) {
  if (parallel.size() == 1 && !parallel.fp8) {
    return plain_linear(x, {{weight, bias}}, layout)[0];
  }
  auto call = c10::make_intrusive<LinearCall>();
  call->layout = layout;
  call->parallel = parallel;
  call->label = label;
  call->has_bias = {bias.defined()};
  std::vector<Tensor> flat = {cast_for_matmul(weight)};
  if (bias.defined()) flat.push_back(cast_for_matmul(bias));
  const auto input = cast_for_matmul(x);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  return RowLinear::apply(input, at::TensorList(flat), call);
}

}  // namespace echelon
