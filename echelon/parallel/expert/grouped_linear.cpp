// One node of the autograd graph for the products of all experts: their results
// and gradients are slices of single tensors, so nothing is concatenated, and
// on a GPU all products can be one kernel.
#include "echelon/parallel/expert/grouped_linear.h"

#include <torch/autograd.h>
#include <torch/types.h>

#include <ATen/core/LegacyTypeDispatch.h>

#include <atomic>
#include <cstdio>
#include <string>
#include <utility>

#include "echelon/cluster/cuda_driver.h"
#include "echelon/layers/low_precision.h"

namespace echelon {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What the function saves besides tensors.
struct GroupedCall : torch::CustomClassHolder {
  RowCounts counts = RowCounts(std::vector<int64_t>{});
  double share = 1;
};

// Calls compute(expert, first row, rows) for each.
template <class Compute>
void for_experts(const RowCounts& counts, const Compute& compute) {
  int64_t begin = 0;
  const auto& rows = counts.on_host();
  for (size_t expert = 0; expert < rows.size(); ++expert) {
    compute(expert, begin, rows[expert]);
    begin += rows[expert];
  }
}

// Whether LibTorch has refused a call. The first refusal is told to the user.
std::atomic<bool>& refused() {
  static std::atomic<bool> once = false;
  return once;
}

bool takes_grouped_product(const Tensor& rows, const Tensor& weight) {
  if (!rows.is_cuda() || rows.scalar_type() != torch::kBFloat16 || refused()) {
    return false;
  }
  static const bool has_kernel = cluster::ask_cuda().capability >= 90;
  return has_kernel && rows.size(0) > 0 && weight.size(0) % 8 == 0 &&
         weight.size(1) % 8 == 0;
}

// The result of `call`; undefined when LibTorch refuses it.
template <class Call>
Tensor unless_refused(const Call& call) {
  try {
    return call();
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {
    if (!refused().exchange(true)) {
      const std::string text = error.what_without_backtrace();
      std::fprintf(
          stderr,
          "warning: LibTorch refuses a grouped product (%s); the products "
          "of experts are computed one by one\n",
          text.substr(0, text.find('\n')).c_str());
    }
    return {};
  }
}

// rows [sum of counts, in] times matrices[expert] [in, out].
Tensor products(
    const Tensor& rows, const RowCounts& counts,
    const std::vector<Tensor>& matrices) {
  auto result =
      torch::empty({rows.size(0), matrices[0].size(1)}, rows.options());
  for_experts(counts, [&](size_t expert, int64_t begin, int64_t size) {
    if (size == 0) return;
    auto to = result.narrow(0, begin, size);
    at::mm_out(to, rows.narrow(0, begin, size), matrices[expert]);
  });
  return result;
}

class GroupedLinear : public torch::autograd::Function<GroupedLinear> {
 public:
  static Tensor forward(
      AutogradContext* context, const Tensor& rows, at::TensorList weights,
      const c10::intrusive_ptr<GroupedCall>& call) {
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    variable_list saved = weights.vec();
    saved.push_back(rows);
    context->save_for_backward(std::move(saved));
    if (takes_grouped_product(rows, weights[0])) {
      const auto all = detail::stacked_in_memory(weights.vec());
      Tensor result;
      if (all.defined()) {
        result = unless_refused(
            [&] { return detail::grouped_product(rows, call->counts, all); });
      }
      if (result.defined()) return result;
    }
    std::vector<Tensor> matrices;
    for (const auto& weight : weights) matrices.push_back(weight.t());
    return products(rows, call->counts, matrices);
  }

  static variable_list
  backward(AutogradContext* context, const variable_list& gradients) {
    const auto capsule = context->saved_data["call"].toCapsule();
    const auto& call = static_cast<const GroupedCall&>(*capsule);
    auto weights = context->get_saved_variables();
    const Tensor rows = std::move(weights.back());
    weights.pop_back();
    variable_list results(weights.size() + 2);
    if (torch::GradMode::is_enabled()) {
      differentiable(rows, weights, gradients[0], call, results);
      return results;
    }
    const auto gradient = gradients[0].contiguous();
    if (context->needs_input_grad(0)) {
      results[0] = to_rows(weights, gradient, call);
    }
    bool any = false;
    for (size_t i = 0; i < weights.size(); ++i) {
      any = any || context->needs_input_grad(i + 1);
    }
    if (!any) return results;
    const auto all = to_weights(rows, weights, gradient, call);
    for (size_t i = 0; i < weights.size(); ++i) {
      results[i + 1] = all[static_cast<int64_t>(i)];
    }
    return results;
  }

 private:
  static Tensor to_rows(
      const variable_list& weights, const Tensor& gradient,
      const GroupedCall& call) {
    if (takes_grouped_product(gradient, weights[0])) {
      const auto all = detail::stacked_in_memory(weights);
      Tensor result;
      if (all.defined()) {
        result = unless_refused([&] {
          return detail::grouped_product(
              gradient, call.counts, all.transpose(1, 2));
        });
      }
      if (result.defined()) return result;
    }
    return products(gradient, call.counts, weights);
  }

  // [experts, out, in].
  static Tensor to_weights(
      const Tensor& rows, const variable_list& weights, const Tensor& gradient,
      const GroupedCall& call) {
    Tensor all;
    if (takes_grouped_product(rows, weights[0])) {
      all = unless_refused([&] {
        return detail::grouped_gradient(rows, call.counts, gradient);
      });
    }
    if (!all.defined()) {
      all = torch::empty(
          {std::ssize(weights), gradient.size(1), rows.size(1)},
          rows.options());
      for_experts(call.counts, [&](size_t expert, int64_t begin, int64_t size) {
        auto to = all[static_cast<int64_t>(expert)];
        if (size == 0) {
          to.zero_();
          return;
        }
        at::mm_out(
            to, gradient.narrow(0, begin, size).t(),
            rows.narrow(0, begin, size));
      });
    }
    return call.share == 1 ? all : all.mul_(call.share);
  }

  // With create_graph: operators that autograd can differentiate.
  static void differentiable(
      const Tensor& rows, const variable_list& weights, const Tensor& gradient,
      const GroupedCall& call, variable_list& results) {
    std::vector<Tensor> of_rows;
    for_experts(call.counts, [&](size_t expert, int64_t begin, int64_t size) {
      const auto own = gradient.narrow(0, begin, size);
      of_rows.push_back(own.mm(weights[expert]));
      results[expert + 1] =
          own.t().mm(rows.narrow(0, begin, size)) * call.share;
    });
    results[0] = at::cat(of_rows);
  }
};

}  // namespace

Tensor detail::stacked_in_memory(const std::vector<Tensor>& tensors) {
  const auto& first = tensors[0];
  int64_t distance = first.numel();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& one = tensors[i];
    if (i == 1) distance = one.storage_offset() - first.storage_offset();
    const bool fits =
        one.sizes() == first.sizes() && one.strides() == first.strides() &&
        one.scalar_type() == first.scalar_type() && one.is_alias_of(first) &&
        one.storage_offset() ==
            first.storage_offset() + static_cast<int64_t>(i) * distance;
    if (!fits || distance <= 0) return {};
  }
  auto sizes = first.sizes().vec();
  auto strides = first.strides().vec();
  sizes.insert(sizes.begin(), std::ssize(tensors));
  strides.insert(strides.begin(), distance);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return first.as_strided(sizes, strides, first.storage_offset());
}

Tensor detail::grouped_product(
    const Tensor& rows, const RowCounts& counts, const Tensor& weights) {
  return at::_grouped_mm(
      rows, weights.transpose(1, 2), counts.ends_on(rows.device()));
}

Tensor detail::grouped_gradient(
    const Tensor& rows, const RowCounts& counts, const Tensor& gradient) {
  return at::_grouped_mm(gradient.t(), rows, counts.ends_on(rows.device()));
}

Tensor grouped_linear(
    const Tensor& rows, const RowCounts& counts,
    const std::vector<Tensor>& weights, double share) {
  auto call = c10::make_intrusive<GroupedCall>();
  call->counts = counts;
  call->share = share;
  std::vector<Tensor> cast;
  for (const auto& weight : weights) cast.push_back(cast_for_matmul(weight));
  const auto input = cast_for_matmul(rows);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  return GroupedLinear::apply(input, at::TensorList(cast), call);
}

}  // namespace echelon
