#include "echelon/models/build.h"
#include "echelon/models/layers.h"

namespace echelon::models {
namespace {

// In place where nothing was cut: what cut products return is a view.
torch::Tensor relu(torch::Tensor y, const TensorParallel& parallel) {
  return parallel.size() == 1 ? at::relu_(y) : at::relu(y);
}

// The features between layer 2 i + 1, which is cut by its outputs, and layer
// 2 i + 2, which is cut by its inputs, are cut; the others are on every rank.
void add_by_outputs(
    LayerList& layers, const std::string& name, const LinearShape& shape,
    bool first, bool last, const TensorParallel& parallel) {
  layers.add(
      name,
      [name, shape, last, parallel] {
        return std::make_shared<ColumnParallelLinear>(
            shape, parallel, name, /*gather_output=*/last);
      },
      [first, last, parallel](
          ColumnParallelLinear& fc, const torch::Tensor& x) {
        const auto y = fc.forward(first ? x.flatten(1) : x);
        return last ? y : relu(y, parallel);
      });
}

void add_by_inputs(
    LayerList& layers, const std::string& name, const LinearShape& shape,
    bool last, const TensorParallel& parallel) {
  layers.add(
      name,
      [name, shape, parallel] {
        return std::make_shared<RowParallelLinear>(shape, parallel, name);
      },
      [last, parallel](RowParallelLinear& fc, const torch::Tensor& x) {
        const auto y = fc.forward(x);
        return last ? y : relu(y, parallel);
      });
}

}  // namespace

LayerList mlp_layers(
    int64_t features, const std::vector<int64_t>& hidden, int64_t classes,
    const TensorParallel& parallel) {
  const auto plain = without_cut_tokens(parallel);
  LayerList layers;
  int64_t in = features;
  for (size_t i = 0; i <= hidden.size(); ++i) {
    const bool last = i == hidden.size();
    const LinearShape shape{.in = in, .out = last ? classes : hidden[i]};
    const std::string name = "fc" + std::to_string(i + 1);
    if (i % 2 == 0) {
      add_by_outputs(layers, name, shape, i == 0, last, plain);
    } else {
      add_by_inputs(layers, name, shape, last, plain);
    }
    in = shape.out;
  }
  return layers;
}

}  // namespace echelon::models
