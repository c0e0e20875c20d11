#include "echelon/parallel/tensor/mlp.h"

#include <torch/autograd.h>
#include <torch/types.h>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "echelon/kernels/elementwise.h"
#include "echelon/parallel/tensor/autograd_support.h"

namespace echelon {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Elements of a piece, which stays in a core's cache from operator to operator.
constexpr int64_t kPiece = int64_t{1} << 14;

// Calls `compute` with the same piece of each tensor, piece after piece. On
// devices other than CPUs calls it once, with the tensors.
void in_pieces(
    const std::vector<Tensor>& tensors,
    const std::function<void(const std::vector<Tensor>&)>& compute) {
  if (!tensors[0].is_cpu()) return compute(tensors);
  const bool contiguous = std::ranges::all_of(
      tensors, [](const Tensor& tensor) { return tensor.is_contiguous(); });
  const int64_t width = contiguous ? 1 : tensors[0].size(-1);
  std::vector<Tensor> rows;
  for (const auto& tensor : tensors) {
    rows.push_back(contiguous ? tensor.view(-1) : tensor.view({-1, width}));
  }
  const int64_t step = std::max<int64_t>(1, kPiece / width);
  at::parallel_for(
      0, rows[0].size(0), 4 * step, [&](int64_t begin, int64_t end) {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        for (int64_t at = begin; at < end; at += step) {
          std::vector<Tensor> pieces;
          for (const auto& tensor : rows) {
            pieces.push_back(tensor.narrow(0, at, std::min(step, end - at)));
          }
          compute(pieces);
        }
      });
}

bool fits_pieces(const Tensor& a, const Tensor& b) {
  const auto fits = [](const Tensor& x) {
    return x.is_contiguous() || kernels::has_rows(x);
  };
  return fits(a) && fits(b) && a.sizes() == b.sizes() &&
         a.scalar_type() == b.scalar_type();
}

bool takes_kernel(const Tensor& a, const Tensor& b) {
  return kernels::takes_elementwise(a) && a.sizes() == b.sizes() &&
         a.scalar_type() == b.scalar_type();
}

// Two tensors like `a`, side by side where `a` and `b` are: their gradient is
// then one tensor too, that of the matmul that made both.
std::pair<Tensor, Tensor> pair_like(const Tensor& a, const Tensor& b) {
  if (!detail::side_by_side({a, b}, -1).defined()) {
    return {
        at::empty(a.sizes(), a.options()), at::empty(a.sizes(), a.options())};
  }
  auto sizes = a.sizes().vec();
  sizes.back() *= 2;
  const auto both = at::empty(sizes, a.options()).chunk(2, -1);
  return {both[0], both[1]};
}

class SiluTimes : public torch::autograd::Function<SiluTimes> {
 public:
  static Tensor
  forward(AutogradContext* context, const Tensor& gate, const Tensor& up) {
    context->save_for_backward({gate, up});
    if (takes_kernel(gate, up)) return kernels::swiglu(gate, up);
    if (!fits_pieces(gate, up)) return at::silu(gate).mul_(up);
    auto result = at::empty(gate.sizes(), gate.options());
    in_pieces({gate, up, result}, [](const std::vector<Tensor>& piece) {
      Tensor out = piece[2];
      at::silu_out(out, piece[0]).mul_(piece[1]);
    });
    return result;
  }

  static variable_list
  backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const auto& gate = saved[0];
    const auto& up = saved[1];
    const auto& gradient = gradients[0];
    // With create_graph, uses operators that autograd can differentiate.
    const bool any_order = at::GradMode::is_enabled();
    if (!any_order && takes_kernel(gate, gradient) && takes_kernel(gate, up)) {
      return kernels::swiglu_gradient(gradient, gate, up).chunk(2, -1);
    }
    if (any_order || !fits_pieces(gate, gradient) || !fits_pieces(gate, up)) {
      const auto share = at::sigmoid(gate);
      return {
          gradient * up * share * (1 + gate * (1 - share)),
          gradient * gate * share};
    }
    const auto [to_gate, to_up] = pair_like(gate, up);
    in_pieces(
        {gate, up, gradient, to_gate, to_up},
        [](const std::vector<Tensor>& piece) {
          Tensor d_gate = piece[3];
          Tensor d_up = piece[4];
          at::mul_out(d_up, piece[2], piece[1]);
          at::silu_backward_out(d_gate, d_up, piece[0]);
          at::silu_out(d_up, piece[0]).mul_(piece[2]);
        });
    return {to_gate, to_up};
  }
};

// A product and its bias, as they are. In a backward of two halves (zero
// bubble) this node gives the bias its gradient in the second half, and keeps
// nothing for it but that sum and the product's gradient, which the product's
// node keeps too. GELU's node has ended by then.
class WithBias : public torch::autograd::Function<WithBias> {
 public:
  static variable_list
  forward(AutogradContext*, const Tensor& x, const Tensor& bias) {
    return {x, bias};
  }
  static variable_list
  backward(AutogradContext*, const variable_list& gradients) {
    return gradients;
  }
};

class GeluWithBias : public torch::autograd::Function<GeluWithBias> {
 public:
  static Tensor
  forward(AutogradContext* context, const Tensor& x, const Tensor& bias) {
    if (!kernels::takes_elementwise(x)) {
      context->save_for_backward({x, bias});
      return at::gelu(x, "tanh");
    }
    const auto found = kernels::gelu(x);
    context->save_for_backward({x, bias, found.counters});
    return found.gelu;
  }

  static variable_list
  backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto& gradient = gradients[0];
    Tensor x = saved[0];
    if (at::GradMode::is_enabled()) {
      // With create_graph, uses operators that autograd can differentiate, and
      // tells it that the product has the bias.
      x = x + (saved[1] - saved[1].detach());
    } else if (saved.size() == 3 && takes_kernel(x, gradient)) {
      const auto found = kernels::gelu_gradient(gradient, x, saved[2]);
      return {found.x, found.bias};
    }
    const auto to_x = at::gelu_backward(gradient, x, "tanh");
    return {to_x, to_x.sum_to_size(saved[1].sizes())};
  }
};

}  // namespace

Tensor gelu_with_bias(const Tensor& x, const Tensor& bias) {
  const auto both = WithBias::apply(x, bias);
  return GeluWithBias::apply(both[0], both[1]);
}

Tensor silu_times(const Tensor& gate, const Tensor& up) {
  return SiluTimes::apply(gate, up);
}

GeluMlp::GeluMlp(
    const MlpShape& shape, TensorParallel parallel, std::string label)
    : in_(register_module(
          "c_fc", std::make_shared<ColumnParallelLinear>(
                      LinearShape{
                          .in = shape.hidden,
                          .out = shape.intermediate,
                          .bias = shape.bias,
                          .layout = WeightLayout::in_out},
                      parallel, label + ".c_fc"))),
      out_(register_module(
          "c_proj", std::make_shared<RowParallelLinear>(
                        LinearShape{
                            .in = shape.intermediate,
                            .out = shape.hidden,
                            .bias = shape.bias,
                            .layout = WeightLayout::in_out},
                        parallel, label + ".c_proj"))) {}

Tensor GeluMlp::forward(const Tensor& x, int64_t tokens) {
  const auto& bias = in_->bias;
  const bool for_bias = bias.defined() && bias.requires_grad();
  const auto inner = in_->forward(x, tokens, !for_bias);
  return out_->forward(
      for_bias ? gelu_with_bias(inner, bias) : at::gelu(inner, "tanh"));
}

GatedMlp::GatedMlp(
    const MlpShape& shape, TensorParallel parallel, std::string label)
    : parallel_(std::move(parallel)),
      label_(std::move(label)),
      gelu_(shape.gelu) {
  const LinearShape in{
      .in = shape.hidden, .out = shape.intermediate, .bias = shape.bias};
  const auto add = [&](const std::string& name) {
    return register_module(
        name, std::make_shared<ColumnParallelLinear>(
                  in, parallel_, label_ + "." + name));
  };
  gate_ = add("gate_proj");
  up_ = add("up_proj");
  down_ = register_module(
      "down_proj", std::make_shared<RowParallelLinear>(
                       LinearShape{
                           .in = shape.intermediate,
                           .out = shape.hidden,
                           .bias = shape.bias},
                       parallel_, label_ + ".down_proj"));
}

Tensor GatedMlp::forward(const Tensor& x, int64_t tokens) {
  const auto inner = ColumnParallelLinear::forward_all(
      {gate_, up_}, x, tokens, label_ + ".gate_up_proj");
  return down_->forward(
      gelu_ ? at::gelu(inner[0], "tanh") * inner[1]
            : silu_times(inner[0], inner[1]));
}

}  // namespace echelon
