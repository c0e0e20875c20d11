#include "echelon/models/weights.h"

#include "echelon/checkpoint/tensor_file.h"
#include "echelon/error.h"
#include "echelon/models/check_weights.h"

namespace echelon {
namespace {

using NamedTensors = std::vector<std::pair<std::string, torch::Tensor>>;

void append(
    const torch::nn::Module& module,
    const std::string& prefix,
    std::vector<std::pair<std::string, torch::Tensor>>& all) {
  const auto take = [&](const auto& items) {
    for (const auto& item : items) {
      if (item.value().defined()) {
        all.emplace_back(prefix + item.key(), item.value());
      }
    }
  };
  take(module.named_parameters(/*recurse=*/false));
  take(module.named_buffers(/*recurse=*/false));
  for (const auto& child : module.named_children()) {
    append(*child.value(), prefix + child.key() + ".", all);
  }
}

std::string dtype_name(torch::Dtype dtype) {
  if (dtype == torch::kFloat64) return "float64";
  if (c10::isFloatingType(dtype)) return "float32";
  return "int64";
}

std::vector<ParameterInfo>
describe(const torch::nn::Module& module, const NamedTensors& tensors) {
  const auto parameters = module.named_parameters();
  std::vector<ParameterInfo> list;
  for (const auto& [name, tensor] : tensors) {
    list.push_back(
        {.name = name,
         .shape = tensor.sizes().vec(),
         .kind = parameters.contains(name) ? ParameterInfo::Kind::parameter
                                           : ParameterInfo::Kind::buffer,
         .dtype = dtype_name(tensor.scalar_type())});
  }
  return list;
}

}  // namespace

std::vector<std::pair<std::string, torch::Tensor>>
state_dict(const torch::nn::Module& module) {
  NamedTensors all;
  append(module, "", all);
  return all;
}

void load_weights(torch::nn::Module& module, const std::string& path) {
  const auto tensors = state_dict(module);
  const safetensors::File file(path);
  const auto lines = weights_differences(file, describe(module, tensors));
  if (!lines.empty()) {
    std::string text = path + ": does not fit the model";
    for (const auto& line : lines) {
      text += "\n  " + line;
    }
    throw DataError(text);
  }
  std::vector<std::string> names;
  NamedTensors targets;
  for (const auto& item : tensors) {
    if (file.find(item.first) != nullptr) {
      names.push_back(item.first);
      targets.push_back(item);
    }
  }
  const auto values = load_tensors(path, names);
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < targets.size(); ++i) {
    targets[i].second.copy_(values[i]);
  }
}

void save_weights(
    const torch::nn::Module& module,
    const std::string& path,
    const safetensors::Metadata& metadata) {
  NamedTensors tensors;
  for (const auto& [name, tensor] : state_dict(module)) {
    tensors.emplace_back(name, tensor.detach());
  }
  save_tensors(path, tensors, metadata);
}

}  // namespace echelon
