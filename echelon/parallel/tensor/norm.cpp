#include "echelon/parallel/tensor/norm.h"

#include <torch/torch.h>

#include "echelon/parallel/tensor/once.h"
#include "echelon/parallel/tensor/row_chunks.h"

namespace echelon {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

ParameterShard
whole(int64_t hidden, const TensorParallel& parallel, double first_value) {
  return {
      replicated({hidden}, parallel.rank()), parallel.cuts_tokens(),
      InitialValue::constant_of(first_value)};
}

bool is_low(torch::Dtype dtype) {
  return dtype == torch::kHalf || dtype == torch::kBFloat16;
}

// In a few passes over rows that are in the cache. A GPU has a fused kernel.
class RmsNorm : public torch::autograd::Function<RmsNorm> {
 public:
  static Tensor forward(
      AutogradContext* context,
      const Tensor& x,
      const Tensor& weight,
      double eps) {
    const auto rows = x.reshape({-1, x.size(-1)});
    auto y = torch::empty_like(rows, torch::MemoryFormat::Contiguous);
    const bool low = is_low(x.scalar_type());
    auto scale = torch::empty(
        {rows.size(0), 1},
        low ? rows.options().dtype(torch::kFloat32) : rows.options());
    detail::for_row_chunks(rows, [&](int64_t begin, int64_t end) {
      const auto part = rows.slice(0, begin, end).to(scale.scalar_type());
      auto root = scale.slice(0, begin, end);
      at::linalg_vector_norm_out(root, part, 2, {-1}, true);
      root.square_().div_(static_cast<double>(x.size(-1))).add_(eps).rsqrt_();
      auto out = y.slice(0, begin, end);
      if (low) {
        // Rounded before it is multiplied by the weight, as others do.
        at::mul_out(out, (part * root).to(x.scalar_type()), weight);
      } else {
        at::mul_out(out, part, root).mul_(weight);
      }
    });
    context->save_for_backward({x, weight, scale});
    return y.view(x.sizes());
  }

  static variable_list
  backward(AutogradContext* context, const variable_list& gradients) {
    detail::refuse_second_derivative("rms_norm");
    const auto saved = context->get_saved_variables();
    const auto rows = saved[0].reshape({-1, saved[0].size(-1)});
    const auto dtype = saved[2].scalar_type();
    const auto weight = saved[1].to(dtype);
    const auto gradient = gradients[0].reshape(rows.sizes());
    const bool for_x = context->needs_input_grad(0);
    const bool for_weight = context->needs_input_grad(1);
    Tensor x_gradient;
    Tensor weight_gradient;
    if (for_x) x_gradient = torch::empty(rows.sizes(), rows.options());
    if (for_weight) weight_gradient = torch::zeros_like(weight);
    const double width = static_cast<double>(rows.size(1));
    detail::for_row_chunks(rows, [&](int64_t begin, int64_t end) {
      const auto scale = saved[2].slice(0, begin, end);
      const auto g = gradient.slice(0, begin, end).to(dtype);
      const auto normal = rows.slice(0, begin, end).to(dtype) * scale;
      const auto product = g * normal;
      if (for_weight) weight_gradient += product.sum(0);
      if (!for_x) return;
      // d x_i = s (g_i w_i - n_i mean(g w n))
      const auto mean = product.mv(weight).div_(width).unsqueeze_(1);
      auto out = g * weight;
      out.addcmul_(normal, mean, -1).mul_(scale);
      x_gradient.slice(0, begin, end).copy_(out);
    });
    if (for_x) x_gradient = x_gradient.view(saved[0].sizes());
    if (for_weight)
      weight_gradient = weight_gradient.to(saved[1].scalar_type());
    return {x_gradient, weight_gradient, Tensor()};
  }
};

}  // namespace

LayerNorm::LayerNorm(
    int64_t hidden, double eps, const TensorParallel& parallel)
    : weight(register_shard("weight", whole(hidden, parallel, 1))),
      bias(register_shard("bias", whole(hidden, parallel, 0))),
      hidden_(hidden),
      eps_(eps) {}

Tensor LayerNorm::forward(const Tensor& x) {
  return at::layer_norm(x, {hidden_}, weight, bias, eps_);
}

RMSNorm::RMSNorm(int64_t hidden, double eps, const TensorParallel& parallel)
    : weight(register_shard("weight", whole(hidden, parallel, 1))), eps_(eps) {}

Tensor RMSNorm::forward(const Tensor& x) {
  return rms_norm(x, weight, eps_);
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  if (x.is_cuda()) {
    return std::get<0>(at::_fused_rms_norm(x, {x.size(-1)}, weight, eps));
  }
  return RmsNorm::apply(x, weight, eps);
}

}  // namespace echelon
