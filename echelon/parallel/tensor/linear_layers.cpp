// The layers of linear.h: which part of a matrix a rank has, and adapters. The
// products are in linear.cpp.
#include <torch/nn/module.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "echelon/comm/differentiable.h"
#include "echelon/error.h"
#include "echelon/parallel/tensor/linear.h"
#include "echelon/text/check.h"

namespace echelon {
namespace {

using torch::Tensor;

// The shard of the stored matrix, given the shard of its features.
Shard matrix_shard(
    const LinearShape& shape, bool shards_outputs, const Shard& features) {
  const bool out_first = shape.layout == WeightLayout::out_in;
  Shard shard = features;
  shard.shape = out_first ? std::vector<int64_t>{shape.out, shape.in}
                          : std::vector<int64_t>{shape.in, shape.out};
  shard.dim = shards_outputs == out_first ? 0 : 1;
  return shard;
}

// One matrix of an adapter, which has a name of its own.
class AdapterMatrix : public ShardedModule {
 public:
  explicit AdapterMatrix(ParameterShard shard)
      : weight(register_shard("weight", std::move(shard))) {}

  torch::Tensor weight;
};

// An adapter's matrix [rows, columns] that is sharded along `dim` as `features`
// says.
Shard adapter_shard(
    const Shard& features, int64_t rows, int64_t columns, int64_t dim) {
  Shard shard = features;
  shard.shape = {rows, columns};
  shard.dim = dim;
  return shard;
}

InitialValue initial_a(int64_t in) {
  return InitialValue::normal_of(
      1 / std::sqrt(static_cast<double>(std::max<int64_t>(1, in))));
}

// The initialisation of torch::nn::Linear, for weight and bias.
InitialValue initial_value(const LinearShape& shape) {
  const auto inputs = static_cast<double>(std::max<int64_t>(1, shape.in));
  return InitialValue::uniform_within(1 / std::sqrt(inputs));
}

}  // namespace

void AdaptedLinear::register_adapter(
    ParameterShard a, ParameterShard b, double scale) {
  ECHELON_CHECK(!has_adapter(), "a linear layer has one adapter");
  const auto add = [&](const char* name, ParameterShard shard) {
    return register_module(
               name, std::make_shared<AdapterMatrix>(std::move(shard)))
        ->weight;
  };
  a_ = add("lora_A", std::move(a));
  b_ = add("lora_B", std::move(b));
  scale_ = scale;
}

void AdaptedLinear::adapt_outputs(
    int64_t out, int64_t in, int64_t rank, double scale,
    const TensorParallel& parallel) {
  const auto own = own_shards().at("weight");
  register_adapter(
      {replicated({rank, in}, parallel.rank()), parallel.size() > 1,
       initial_a(in)},
      {adapter_shard(own.shard, out, rank, 0), own.sum_gradients,
       InitialValue::constant_of(0)},
      scale);
}

void AdaptedLinear::adapt_inputs(
    int64_t out, int64_t in, int64_t rank, double scale,
    const TensorParallel& parallel, bool sum_gradients) {
  const auto own = own_shards().at("weight");
  register_adapter(
      {adapter_shard(own.shard, rank, in, 1), false, initial_a(in)},
      {replicated({out, rank}, parallel.rank()), sum_gradients,
       InitialValue::constant_of(0)},
      scale);
}

Tensor AdaptedLinear::with_adapter(const Tensor& y, const Tensor& inner) const {
  return y + at::linear(inner * scale_, b_);
}

void add_adapters(
    torch::nn::Module& module, const std::vector<std::string>& names,
    int64_t rank, double scale) {
  const auto modules = module.named_modules();
  for (const auto& name : names) {
    const auto* found = modules.find(name);
    auto* linear = found ? dynamic_cast<AdaptedLinear*>(found->get()) : nullptr;
    if (linear == nullptr) {
      throw Error("\"" + name + "\" is no linear layer that has adapters");
    }
    linear->add_adapter(rank, scale);
  }
}

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
          {matrix_shard(shape, true, outputs), shared, initial_value(shape)})),
      shape_(shape),
      parallel_(std::move(parallel)),
      label_(std::move(label)) {
  if (!shape.bias) return;
  Shard one = outputs;
  one.shape = {shape.out};
  one.dim = 0;
  bias = register_shard("bias", {one, shared, initial_value(shape)});
}

void ColumnParallelLinear::add_adapter(int64_t rank, double scale) {
  adapt_outputs(shape_.out, shape_.in, rank, scale, parallel_);
}

// A is one more matrix that multiplies the input.
void ColumnParallelLinear::add_weights(
    std::vector<LinearWeights>& weights) const {
  weights.push_back({weight, bias});
  if (!has_adapter()) return;
  weights.push_back(
      {shape_.layout == WeightLayout::in_out ? a_.t() : a_, Tensor()});
}

Tensor ColumnParallelLinear::forward_joined(
    const std::vector<std::shared_ptr<ColumnParallelLinear>>& layers,
    const Tensor& x, int64_t tokens, const std::string& label) {
  const auto& first = *layers.front();
  if (layers.size() == 1 || first.shape_.layout == WeightLayout::in_out) {
    return {};
  }
  std::vector<LinearWeights> weights;
  for (const auto& layer : layers) {
    if (layer->has_adapter()) return {};
    weights.push_back(layer->weights());
  }
  const auto one = joined(weights);
  if (!one) return {};
  return column_linear(
      x, {*one}, first.shape_.layout, first.parallel_, tokens, label)[0];
}

std::vector<Tensor> ColumnParallelLinear::forward_all(
    const std::vector<std::shared_ptr<ColumnParallelLinear>>& layers,
    const Tensor& x, int64_t tokens, const std::string& label) {
  const auto& first = *layers.front();
  if (const auto all = forward_joined(layers, x, tokens, label);
      all.defined()) {
    std::vector<int64_t> sizes;
    for (const auto& layer : layers) sizes.push_back(layer->weight.size(0));
    return split_features(all, sizes);
  }
  std::vector<LinearWeights> weights;
  for (const auto& layer : layers) layer->add_weights(weights);
  const auto outputs = column_linear(
      x, weights, first.shape_.layout, first.parallel_, tokens, label);
  std::vector<Tensor> results;
  size_t next = 0;
  for (const auto& layer : layers) {
    results.push_back(outputs[next++]);
    if (!layer->has_adapter()) continue;
    results.back() = layer->with_adapter(results.back(), outputs[next++]);
  }
  return results;
}

torch::Tensor ColumnParallelLinear::forward(
    const torch::Tensor& x, int64_t tokens, bool for_bias) {
  std::vector<LinearWeights> weights;
  add_weights(weights);
  if (!for_bias && bias.defined()) weights[0].bias = bias.detach();
  const auto outputs =
      column_linear(x, weights, shape_.layout, parallel_, tokens, label_);
  const auto y =
      has_adapter() ? with_adapter(outputs[0], outputs[1]) : outputs[0];
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
          {matrix_shard(shape, false, inputs), false, initial_value(shape)})),
      shape_(shape),
      parallel_(std::move(parallel)),
      label_(std::move(label)) {
  if (!shape.bias) return;
  bias = register_shard(
      "bias", {replicated({shape.out}, parallel_.rank()),
               parallel_.splits_tokens(), initial_value(shape)});
}

torch::Tensor RowParallelLinear::forward(const torch::Tensor& x) {
  const auto part =
      scatter_input_
          ? scatter_to(
                x, parallel_.group, -1, even_split(shape_.in, parallel_.size()),
                label_ + " input gradient")
          : x;
  const auto y =
      row_linear(part, weight, bias, shape_.layout, parallel_, label_);
  if (!has_adapter()) return y;
  return with_adapter(
      y, row_linear(
             part, a_, Tensor(), WeightLayout::out_in, parallel_,
             label_ + ".lora_A"));
}

// B applies to whole sums x A, of this rank's tokens.
void RowParallelLinear::add_adapter(int64_t rank, double scale) {
  adapt_inputs(
      shape_.out, shape_.in, rank, scale, parallel_, parallel_.splits_tokens());
}

}  // namespace echelon
