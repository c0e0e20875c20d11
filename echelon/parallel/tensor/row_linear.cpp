// Products whose sum over the ranks is on its way while the next chunk is
// multiplied (options.overlap_chunks), and back.
#include <torch/autograd.h>
#include <torch/types.h>

#include <optional>
#include <utility>

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

Tensor
reduced_product(const Tensor& x, const Tensor& weight, const LinearCall& call) {
  const int64_t rows = x.size(0);
  const int64_t chunks = std::clamp<int64_t>(
      call.parallel.options.overlap_chunks, 1, std::max<int64_t>(1, rows));
  auto sum = torch::empty(
      {rows, detail::outputs_of(weight, call.layout)}, x.options());
  std::vector<Work> works;
  for (int64_t c = 0; c < chunks; ++c) {
    const auto range = even_range(rows, c, chunks);
    const auto part = sum.slice(0, range.begin, range.end);
    detail::product_out(
        part, x.slice(0, range.begin, range.end), {weight, {}}, call.layout);
    works.push_back(call.parallel.group.all_reduce(
        part, ReduceOp::sum,
        {.label = call.label + " sum", .async = c + 1 < chunks}));
  }
  for (const auto& work : works) work.wait();
  return sum;
}

Tensor scattered_product(
    const Tensor& x, const Tensor& weight, const LinearCall& call) {
  const detail::TokenChunks chunks(
      x.size(0), call.parallel, call.parallel.options.overlap_chunks);
  detail::TokenReduceScatter scatter(
      detail::outputs_of(weight, call.layout), x.options(), chunks,
      call.parallel, call.label + " scatter");
  const auto multiply = [&](const Tensor& to, const IndexRange& range) {
    detail::product_out(
        to, x.slice(0, range.begin, range.end), {weight, {}}, call.layout);
  };
  for (int64_t c = 0; c < chunks.count(); ++c) {
    if (chunks.plain()) {
      multiply(scatter.all(), {0, x.size(0)});
    } else {
      for (int rank = 0; rank < chunks.ranks(); ++rank) {
        multiply(scatter.rows(rank, c), chunks.rows(rank, c));
      }
    }
    scatter.start(c);
  }
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
    const auto rows = detail::as_rows(x);
    const bool cut = call->parallel.cuts_tokens();
    const auto sum = as_one_operator("echelon::row_linear", [&] {
      auto all = cut ? scattered_product(rows, flat[0], *call)
                     : reduced_product(rows, flat[0], *call);
      if (flat.size() > 1) all.add_(flat[1]);
      return variable_list{all};
    })[0];
    return cut ? sum : sum.view(detail::with_features(x, sum.size(1)));
  }

  static variable_list
  backward(AutogradContext* context, const variable_list& gradients) {
    detail::refuse_second_derivative("row_linear");
    const auto capsule = context->saved_data["call"].toCapsule();
    const auto& call = static_cast<const LinearCall&>(*capsule);
    const auto saved = context->get_saved_variables();
    const auto& x = saved[0];
    const auto& weight = saved[1];
    const auto rows = detail::as_rows(x);
    const auto gradient = detail::as_rows(gradients[0]);
    const bool for_x = context->needs_input_grad(0);
    const bool for_weight = context->needs_input_grad(1);

    std::optional<detail::TokenGather> gather;
    const detail::TokenChunks chunks(
        rows.size(0), call.parallel, call.parallel.options.overlap_chunks);
    if (call.parallel.cuts_tokens() && (for_x || for_weight)) {
      gather.emplace(gradient, chunks, call.parallel, call.label + " gather");
    }
    variable_list results = {Tensor(), Tensor()};
    if (call.has_bias[0]) {
      results.push_back(
          context->needs_input_grad(2) ? gradient.sum(0) : Tensor());
    }
    if (for_x) {
      results[0] = torch::empty(x.sizes(), x.options());
      const auto to = detail::as_rows(results[0]);
      if (!gather || chunks.plain()) {
        detail::input_gradient_out(
            to, gather ? gather->whole() : gradient, weight, call.layout,
            false);
      } else {
        write_chunks(to, *gather, chunks, weight, call.layout);
      }
    }
    if (for_weight) {
      results[1] = detail::weight_gradient(
          rows, gather ? gather->whole() : gradient, call.layout);
    }
    results.emplace_back();
    return results;
  }

 private:
  static void write_chunks(
      const Tensor& to, detail::TokenGather& gather,
      const detail::TokenChunks& chunks, const Tensor& weight,
      WeightLayout layout) {
    for (int64_t c = 0; c < chunks.count(); ++c) {
      for (int rank = 0; rank < chunks.ranks(); ++rank) {
        const auto range = chunks.rows(rank, c);
        detail::input_gradient_out(
            to.slice(0, range.begin, range.end), gather.rows(rank, c), weight,
            layout, false);
      }
    }
  }
};

}  // namespace

Tensor row_linear(
    const Tensor& x, const Tensor& weight, const Tensor& bias,
    WeightLayout layout, const TensorParallel& parallel,
    const std::string& label) {
  if (parallel.size() == 1) {
    return at::linear(x, detail::in_by_out(weight, layout).t(), bias);
  }
  auto call = c10::make_intrusive<LinearCall>();
  call->layout = layout;
  call->parallel = parallel;
  call->label = label;
  call->has_bias = {bias.defined()};
  std::vector<Tensor> flat = {detail::for_product(weight)};
  if (bias.defined()) flat.push_back(detail::for_product(bias));
  const auto input = detail::for_product(x);
  const detail::WithoutAutocast guard;
  return RowLinear::apply(input, at::TensorList(flat), call);
}

}  // namespace echelon
