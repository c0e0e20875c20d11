#include "echelon/parallel/tensor/linear.h"

#include <torch/torch.h>

#include <utility>

#include "echelon/comm/differentiable.h"
#include "echelon/error.h"

namespace echelon {
namespace {

torch::Tensor product(
    const torch::Tensor& x, const LinearWeights& weights, WeightLayout layout) {
  const auto weight = layout == WeightLayout::out_in ? weights.weight
                                                     : weights.weight.t();
  return at::linear(x, weight, weights.bias);
}

// Sizes of the ranks' parts of `total` things.
std::vector<int64_t> parts_of(int64_t total, const TensorParallel& parallel) {
  return even_split(total, parallel.size());
}

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

bool overlaps(const Shard& shard) {
  return shard.owned != shard.pieces;
}

}  // namespace

std::vector<torch::Tensor> column_linear(
    const torch::Tensor& x,
    const std::vector<LinearWeights>& weights,
    WeightLayout layout,
    const TensorParallel& parallel,
    int64_t tokens,
    const std::string& label) {
  const auto input = parallel.cuts_tokens()
      ? all_gather(x, parallel.group, 0, parts_of(tokens, parallel), label)
      : copy_to(x, parallel.group, label);
  std::vector<torch::Tensor> outputs;
  for (const auto& one : weights) {
    outputs.push_back(product(input, one, layout));
  }
  return outputs;
}

torch::Tensor row_linear(
    const torch::Tensor& x,
    const torch::Tensor& weight,
    const torch::Tensor& bias,
    WeightLayout layout,
    const TensorParallel& parallel,
    const std::string& label) {
  auto sum = product(x, {weight, {}}, layout);
  sum = parallel.cuts_tokens()
      ? reduce_scatter(
            sum, parallel.group, 0, parts_of(sum.size(0), parallel), label)
      : reduce_from(sum, parallel.group, label);
  return bias.defined() ? sum + bias : sum;
}

ColumnParallelLinear::ColumnParallelLinear(
    const LinearShape& shape,
    TensorParallel parallel,
    std::string label,
    bool gather_output)
    : ColumnParallelLinear(
          shape,
          parallel,
          std::move(label),
          even_shard({shape.out}, 0, parallel.rank(), parallel.size())) {
  gather_output_ = gather_output;
  output_sizes_ = parts_of(shape.out, parallel_);
}

ColumnParallelLinear::ColumnParallelLinear(
    const LinearShape& shape,
    TensorParallel parallel,
    std::string label,
    const Shard& outputs)
    : weight(register_shard(
          "weight",
          {matrix_shard(shape, true, outputs), overlaps(outputs)})),
      shape_(shape),
      parallel_(std::move(parallel)),
      label_(std::move(label)) {
  if (!shape.bias) return;
  Shard one = outputs;
  one.shape = {shape.out};
  one.dim = 0;
  bias = register_shard("bias", {one, overlaps(outputs)});
}

torch::Tensor
ColumnParallelLinear::forward(const torch::Tensor& x, int64_t tokens) {
  auto y = column_linear(
      x, {weights()}, shape_.layout, parallel_, tokens, label_)[0];
  if (!gather_output_) return y;
  return gather_from(y, parallel_.group, -1, output_sizes_, label_);
}

RowParallelLinear::RowParallelLinear(
    const LinearShape& shape,
    TensorParallel parallel,
    std::string label,
    bool scatter_input)
    : RowParallelLinear(
          shape,
          parallel,
          std::move(label),
          even_shard({shape.in}, 0, parallel.rank(), parallel.size())) {
  scatter_input_ = scatter_input;
}

RowParallelLinear::RowParallelLinear(
    const LinearShape& shape,
    TensorParallel parallel,
    std::string label,
    const Shard& inputs)
    : weight(register_shard("weight", {matrix_shard(shape, false, inputs)})),
      shape_(shape),
      parallel_(std::move(parallel)),
      label_(std::move(label)) {
  if (!shape.bias) return;
  bias = register_shard(
      "bias",
      {replicated({shape.out}, parallel_.rank()), parallel_.cuts_tokens()});
}

torch::Tensor RowParallelLinear::forward(const torch::Tensor& x) {
  const auto part = scatter_input_
      ? scatter_to(
            x, parallel_.group, -1, parts_of(shape_.in, parallel_), label_)
      : x;
  return row_linear(part, weight, bias, shape_.layout, parallel_, label_);
}

}  // namespace echelon
