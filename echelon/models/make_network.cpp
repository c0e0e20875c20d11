#include "echelon/models/make_network.h"

#include <torch/nn/module.h>
#include <torch/types.h>

#include <string>
#include <utility>

#include "echelon/architecture/language_model.h"
#include "echelon/architecture/parameter_list.h"
#include "echelon/architecture/trained_parameters.h"
#include "echelon/layers/sharded_module.h"
#include "echelon/models/build.h"
#include "echelon/parallel/expert/exchange.h"
#include "echelon/parallel/tensor/linear.h"

namespace echelon {
namespace {

// Module::to would also convert the batch counters to floating point.
void to_float64(torch::nn::Module& module) {
  auto convert = [](const auto& tensors) {
    for (auto tensor : tensors) {
      if (tensor.is_floating_point()) {
        tensor.set_data(tensor.detach().to(torch::kFloat64));
      }
    }
  };
  convert(module.parameters());
  convert(module.buffers());
}

LayerList plain_layers(
    const ModelOptions& options, const std::vector<int64_t>& shape,
    int64_t classes, const TensorParallel& parallel) {
  if (options.name == "simple_cnn") {
    return models::simple_cnn_layers(shape, classes, parallel);
  }
  if (options.name == "mlp") {
    return models::mlp_layers(
        c10::multiply_integers(shape), options.hidden, classes, parallel);
  }
  if (is_language_model(options)) {
    const auto numbers = language_model_shape(options, classes);
    check_language_model(options, classes, shape[0], parallel.size());
    return numbers.kind->gpt ? models::gpt_layers(numbers, parallel)
                             : models::llama_layers(numbers, parallel);
  }
  return models::resnet_layers(
      resnet_config(options.name), shape[0], classes, parallel);
}

// The linear layers with adapters among the tensors of one layer, as its module
// names them.
std::vector<std::string>
adapted_in(const std::string& layer, const std::vector<ParameterInfo>& own) {
  std::vector<std::string> names;
  for (const auto& info : own) {
    if (!info.name.ends_with(kAdapterA)) continue;
    const size_t begin = layer.size() + 1;
    names.push_back(
        info.name.substr(begin, info.name.size() - kAdapterA.size() - begin));
  }
  return names;
}

// The tensors of one layer on this rank, named as its module names them.
std::vector<ParameterInfo> parameters_of(
    const std::string& layer, const std::vector<ParameterInfo>& all,
    int64_t num_experts, const Group& ranks) {
  const auto experts = experts_of(num_experts, ranks);
  std::vector<ParameterInfo> own;
  for (const auto& info : all) {
    if (!info.name.starts_with(layer + ".")) continue;
    const auto expert = expert_of(info.name);
    const bool elsewhere =
        expert && (*expert < experts.begin || *expert >= experts.end);
    if (!elsewhere) own.push_back(info);
  }
  return own;
}

}  // namespace

LayerList model_layers(
    const ModelOptions& options, const std::vector<int64_t>& input_shape,
    int64_t classes, const TensorParallel& parallel) {
  const auto all = list_parameters(options, input_shape, classes);
  const bool wide = options.dtype == ModelDtype::float64;
  const auto plain = plain_layers(options, input_shape, classes, parallel);
  LayerList layers;
  for (auto layer : plain.layers()) {
    const auto own =
        parameters_of(layer.name, all, options.experts, parallel.experts);
    layer.initialize = [name = layer.name, own](
                           torch::nn::Module& module, uint64_t seed) {
      initialize(module, name + ".", own, seed);
    };
    if (const auto names = adapted_in(layer.name, own); !names.empty()) {
      layer.build = [names, lora = options.lora,
                     build = std::move(layer.build)] {
        BuiltLayer built = build();
        add_adapters(*built.module, names, lora.rank, lora.scale());
        return built;
      };
    }
    if (wide) {
      layer.build = [build = std::move(layer.build)] {
        BuiltLayer built = build();
        to_float64(*built.module);
        return built;
      };
    }
    layers.add_definition(std::move(layer));
  }
  for (const auto& tie : plain.ties()) layers.tie(tie.first, tie.second);
  return layers;
}

std::shared_ptr<Network> make_network(
    const ModelOptions& options, const std::vector<int64_t>& input_shape,
    int64_t classes, uint64_t seed) {
  const LayerList layers = model_layers(options, input_shape, classes);
  return build_network(layers, 0, layers.size(), seed);
}

}  // namespace echelon
