#include "echelon/parallel/tensor/norm.h"

#include <torch/autograd.h>
#include <torch/types.h>

#include <optional>

#include "echelon/kernels/norm.h"
#include "echelon/layers/computing_device.h"
#include "echelon/layers/low_precision.h"
#include "echelon/parallel/tensor/autograd_support.h"

namespace echelon {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

ParameterShard replicated_parameter(
    int64_t hidden, const TensorParallel& parallel, double value,
    bool of_heads = false) {
  return {
      replicated({hidden}, parallel.rank()),
      parallel.splits_tokens() || (of_heads && parallel.size() > 1),
      InitialValue::constant_of(value)};
}

// The norm takes a few passes over rows that stay in the cache. GPUs have a
// fused kernel.
class RmsNorm : public torch::autograd::Function<RmsNorm> {
 public:
  static Tensor forward(
      AutogradContext* context, const Tensor& x, const Tensor& weight,
      double eps) {
    const auto rows = x.reshape({-1, x.size(-1)});
    auto y = torch::empty_like(rows, torch::MemoryFormat::Contiguous);
    const bool low = is_low_precision(x.scalar_type());
    auto scale = torch::empty(
        {rows.size(0), 1}, rows.options().dtype(sum_dtype(x.scalar_type())));
    detail::for_row_chunks(rows, [&](int64_t begin, int64_t end) {
      const auto part = rows.slice(0, begin, end).to(scale.scalar_type());
      auto root = scale.slice(0, begin, end);
      at::linalg_vector_norm_out(root, part, 2, {-1}, true);
      root.square_().div_(static_cast<double>(x.size(-1))).add_(eps).rsqrt_();
      auto out = y.slice(0, begin, end);
      if (low) {
        // Rounds before it multiplies by the weight, as other implementations
        // do.
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

// Normalises low precision on CPUs. Their kernels take parameters in float32
// and keep float32 statistics, but sum the parameters' gradients in the dtype
// of x.
class LowLayerNorm : public torch::autograd::Function<LowLayerNorm> {
 public:
  static Tensor forward(
      AutogradContext* context, const Tensor& x, const Tensor& weight,
      const Tensor& bias, double eps) {
    const auto [y, mean, scale] = at::native_layer_norm(
        x, {x.size(-1)}, for_sums(weight), for_sums(bias), eps);
    context->save_for_backward({x, weight, bias, mean, scale});
    return y;
  }

  static variable_list
  backward(AutogradContext* context, const variable_list& gradients) {
    detail::refuse_second_derivative("LayerNorm");
    const auto saved = context->get_saved_variables();
    const auto& x = saved[0];
    Tensor for_x;
    if (context->needs_input_grad(0)) {
      for_x = std::get<0>(at::native_layer_norm_backward(
          gradients[0], x, {x.size(-1)}, saved[3], saved[4], for_sums(saved[1]),
          for_sums(saved[2]), {true, false, false}));
    }
    auto for_weight = torch::zeros_like(saved[1], saved[3].options());
    auto for_bias = torch::zeros_like(for_weight);
    const auto rows = x.reshape({-1, x.size(-1)});
    const auto gradient = gradients[0].reshape(rows.sizes());
    const auto mean = saved[3].reshape({-1, 1});
    const auto scale = saved[4].reshape({-1, 1});
    detail::for_row_chunks(rows, [&](int64_t begin, int64_t end) {
      const auto part = [&](const Tensor& all) {
        return all.slice(0, begin, end);
      };
      const auto g = for_sums(part(gradient));
      const auto normal = (part(rows) - part(mean)).mul_(part(scale));
      for_weight += normal.mul_(g).sum(0);
      for_bias += g.sum(0);
    });
    return {
        for_x, for_weight.to(saved[1].scalar_type()),
        for_bias.to(saved[2].scalar_type()), Tensor()};
  }
};

// The norm of x + added, or of x, and that sum, for GPUs: RMSNorm without a
// bias, else LayerNorm.
class ResidualNorm : public torch::autograd::Function<ResidualNorm> {
 public:
  using MaybeTensor = std::optional<Tensor>;

  static variable_list forward(
      AutogradContext* context, const Tensor& x, const MaybeTensor& added,
      const Tensor& weight, const MaybeTensor& bias, double eps) {
    const auto found = kernels::residual_norm(
        x, added.value_or(Tensor()), weight, bias.value_or(Tensor()), eps);
    context->set_materialize_grads(false);
    context->saved_data["adds"] = added.has_value();
    const auto& sum = added ? found.sum : x;
    context->save_for_backward({sum, weight, found.statistics});
    return {found.norm, sum};
  }

  static variable_list
  backward(AutogradContext* context, const variable_list& gradients) {
    detail::refuse_second_derivative("a norm");
    const auto& for_norm = gradients[0];
    const auto& passed = gradients[1];
    const bool adds = context->saved_data["adds"].toBool();
    const auto by_argument = [&](const Tensor& to_sum, const Tensor& to_weight,
                                 const Tensor& to_bias) -> variable_list {
      return {to_sum, adds ? to_sum : Tensor(), to_weight, to_bias, Tensor()};
    };
    if (!for_norm.defined()) return by_argument(passed, {}, {});
    const auto saved = context->get_saved_variables();
    const bool has_bias = saved[2].size(0) == 2;
    // Tensors that are not there are not counted.
    const size_t weight = adds ? 2 : 1;
    const bool for_weight = context->needs_input_grad(weight);
    const bool for_bias = has_bias && context->needs_input_grad(weight + 1);
    const auto found = kernels::residual_norm_gradient(
        for_norm, passed, saved[0], saved[1], saved[2], for_weight || for_bias);
    const auto part = [&](bool wanted, int64_t i) {
      return wanted ? found.parameters[i] : Tensor();
    };
    return by_argument(found.sum, part(for_weight, 0), part(for_bias, 1));
  }
};

std::optional<Tensor> if_defined(const Tensor& x) {
  return x.defined() ? std::optional(x) : std::nullopt;
}

template <class Norm>
NormedSum norm_of_sum(
    Norm& norm, const Tensor& x, const Tensor& added, const Tensor& weight,
    const Tensor& bias, double eps) {
  const bool alike =
      !added.defined() ||
      (added.sizes() == x.sizes() && added.scalar_type() == x.scalar_type());
  if (alike && kernels::takes_norm(x, weight)) {
    const auto both = ResidualNorm::apply(
        x, if_defined(added), weight, if_defined(bias), eps);
    return {.sum = both[1], .norm = both[0]};
  }
  const auto sum = added.defined() ? x + added : x;
  return {.sum = sum, .norm = norm.forward(sum)};
}

}  // namespace

LayerNorm::LayerNorm(int64_t hidden, double eps, const TensorParallel& parallel)
    : weight(
          register_shard("weight", replicated_parameter(hidden, parallel, 1))),
      bias(register_shard("bias", replicated_parameter(hidden, parallel, 0))),
      hidden_(hidden),
      eps_(eps) {}

Tensor LayerNorm::forward(const Tensor& x) {
  const bool on_cpu = computing_device(x) == torch::kCPU;
  if (on_cpu && is_low_precision(x.scalar_type())) {
    return LowLayerNorm::apply(x, weight, bias, eps_);
  }
  return at::layer_norm(x, {hidden_}, weight, bias, eps_);
}

NormedSum LayerNorm::forward_sum(const Tensor& x, const Tensor& added) {
  return norm_of_sum(*this, x, added, weight, bias, eps_);
}

RMSNorm::RMSNorm(
    int64_t hidden, double eps, const TensorParallel& parallel, bool of_heads,
    bool add_one)
    : weight(register_shard(
          "weight",
          replicated_parameter(hidden, parallel, add_one ? 0 : 1, of_heads))),
      eps_(eps),
      add_one_(add_one) {}

Tensor RMSNorm::forward(const Tensor& x) {
  return rms_norm(x, add_one_ ? weight + 1 : weight, eps_);
}

NormedSum RMSNorm::forward_sum(const Tensor& x, const Tensor& added) {
  return norm_of_sum(
      *this, x, added, add_one_ ? weight + 1 : weight, Tensor(), eps_);
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  if (computing_device(x) == torch::kCUDA) {
    return std::get<0>(at::_fused_rms_norm(x, {x.size(-1)}, weight, eps));
  }
  return RmsNorm::apply(x, weight, eps);
}

}  // namespace echelon
