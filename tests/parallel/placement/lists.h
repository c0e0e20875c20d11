// Lists of layers that placements are tried on, in float64.
#pragma once

#include <torch/torch.h>

#include <tuple>

#include "echelon/layers/layer_list.h"
#include "echelon/models/make_network.h"

namespace echelon::placement {

template <class M>
auto in_float64(M module) {
  module->to(torch::kFloat64);
  return module;
}

inline auto linear(int64_t in, int64_t out, bool bias = true) {
  return in_float64(
      torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(bias)));
}

struct Case {
  const char* name;
  LayerList layers;
  torch::Tensor input;  // float64, or words
};

inline Case model_case(const char* name) {
  ModelOptions options;
  options.name = name;
  options.dtype = ModelDtype::float64;
  options.hidden = {24, 20, 16, 12};
  return {
      name, model_layers(options, {3, 16, 16}, 10),
      torch::sin(torch::arange(3 * 3 * 16 * 16, torch::kFloat64) * 0.37)
          .view({3, 3, 16, 16})};
}

// A skip connection over all slices, an operator in place at a border, a layer
// without parameters.
inline Case skip_case() {
  LayerList layers;
  layers.add("in", [] { return linear(12, 8); });
  layers.add_function(
      "split", [](torch::Tensor x) { return std::make_tuple(x.tanh(), x); });
  for (int i = 0; i < 2; ++i) {
    layers.add_definition(
        {"block." + std::to_string(i), [] {
           auto fc = linear(8, 8);
           return BuiltLayer{
               fc.ptr(), [fc](const Tensors& inputs) mutable -> Tensors {
                 auto x = inputs[0] * 1.5;
                 return {fc(x.relu_()), inputs[1]};
               }};
         }});
  }
  layers.add_function(
      "add", [](torch::Tensor x, torch::Tensor skip) { return x.add_(skip); });
  layers.add("out", [] { return linear(8, 10); });
  return {
      "skip", layers,
      torch::cos(torch::arange(60, torch::kFloat64)).view({5, 12})};
}

// The first and the last layer are one matrix, as in language models.
inline Case tied_case() {
  LayerList layers;
  layers.add("words", [] { return in_float64(torch::nn::Embedding(10, 8)); });
  layers.add("fc1", [] { return linear(8, 8); });
  layers.add_function("relu", [](torch::Tensor x) { return x.relu(); });
  layers.add("fc2", [] { return linear(8, 8); });
  layers.add("head", [] { return linear(8, 10, /*bias=*/false); });
  layers.tie("words.weight", "head.weight");
  return {"tied", layers, torch::arange(7).remainder(10)};
}

}  // namespace echelon::placement
