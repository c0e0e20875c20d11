#include "echelon/parallel/tensor/linear.h"

#include <torch/nn/module.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "echelon/comm/differentiable.h"

namespace echelon {
namespace {

// The shard of a matrix whose features `features` cuts, as it is stored.
Shard matrix_shard(
    const LinearShape& shape, bool cut_outputs, const Shard& features) {
  const bool out_first = shape.layout == WeightLayout::out_in;
  Shard shard = features;
  shard.shape = out_first ? std::vector<int64_t>{shape.out, shape.in}
                          : std::vector<int64_t>{shape.in, shape.out};
  shard.dim = cut_outputs == out_first ? 0 : 1;
  return shard;
}

// As torch::nn::Linear begins, weight and bias.
InitialValue first_value(const LinearShape& shape) {
  const auto inputs = static_cast<double>(std::max<int64_t>(1, shape.in));
  return InitialValue::uniform_within(1 / std::sqrt(inputs));
}

}  // namespace

ColumnParallelLinear::ColumnParallelLinear(
    const LinearShape& shape, TensorParallel parallel, std::string label,
    bool gather_output)
    : ColumnParallelLinear(
          shape, parallel, std::move(label),
          even_shard({shape.out}, 0, parallel.rank(), parallel.size()),
          /*shared=*/false) {
  gather_output_ = gather_output;
  output_sizes_ = even_split(shape.out, parallel_.size());
}

ColumnParallelLinear::ColumnParallelLinear(
    const LinearShape& shape, TensorParallel parallel, std::string label,
    const Shard& outputs, bool shared)
    : weight(register_shard(
          "weight",
          {matrix_shard(shape, true, outputs), shared, first_value(shape)})),
      shape_(shape),
      parallel_(std::move(parallel)),
      label_(std::move(label)) {
  if (!shape.bias) return;
  Shard one = outputs;
  one.shape = {shape.out};
  one.dim = 0;
  bias = register_shard("bias", {one, shared, first_value(shape)});
}

torch::Tensor
ColumnParallelLinear::forward(const torch::Tensor& x, int64_t tokens) {
  auto y = column_linear(
      x, {weights()}, shape_.layout, parallel_, tokens, label_)[0];
  if (!gather_output_) return y;
  return gather_from(y, parallel_.group, -1, output_sizes_, label_ + " gather");
}

RowParallelLinear::RowParallelLinear(
    const LinearShape& shape, TensorParallel parallel, std::string label,
    bool scatter_input)
    : RowParallelLinear(
          shape, parallel, std::move(label),
          even_shard({shape.in}, 0, parallel.rank(), parallel.size())) {
  scatter_input_ = scatter_input;
}

RowParallelLinear::RowParallelLinear(
    const LinearShape& shape, TensorParallel parallel, std::string label,
    const Shard& inputs)
    : weight(register_shard(
          "weight",
          {matrix_shard(shape, false, inputs), false, first_value(shape)})),
      shape_(shape),
      parallel_(std::move(parallel)),
      label_(std::move(label)) {
  if (!shape.bias) return;
  bias = register_shard(
      "bias", {replicated({shape.out}, parallel_.rank()),
               parallel_.cuts_tokens(), first_value(shape)});
}

torch::Tensor RowParallelLinear::forward(const torch::Tensor& x) {
  const auto part =
      scatter_input_
          ? scatter_to(
                x, parallel_.group, -1, even_split(shape_.in, parallel_.size()),
                label_ + " input gradient")
          : x;
  return row_linear(part, weight, bias, shape_.layout, parallel_, label_);
}

}  // namespace echelon
