#include "echelon/architecture/check_weights.h"

#include <algorithm>
#include <map>
#include <set>

#include "echelon/error.h"
#include "echelon/text/nearest.h"

namespace echelon {
namespace {

using safetensors::shape_string;

std::vector<std::string> accepted(const std::string& dtype) {
  if (dtype == "float64") return {"F64", "F32", "F16", "BF16"};
  if (dtype == "float32") return {"F32", "F16", "BF16"};
  return {"I64"};
}

std::string quoted(const std::string& name) {
  return "\"" + name + "\"";
}

// BatchNorm's counter of batches is used only without a momentum, which none
// of our models does; files of old PyTorch releases lack it.
bool may_be_missing(const ParameterInfo& parameter) {
  return parameter.kind == ParameterInfo::Kind::buffer &&
         parameter.name.ends_with("num_batches_tracked");
}

using ByName = std::map<std::string, const TensorFacts*>;

// A tied parameter is wanted by the name that owns it; any other will do.
bool has_tied(
    const ByName& tensors, const std::vector<ParameterInfo>& parameters,
    const ParameterInfo& parameter) {
  if (!parameter.tied_to.empty()) return true;
  return std::any_of(
      parameters.begin(), parameters.end(), [&](const ParameterInfo& other) {
        return other.tied_to == parameter.name && tensors.contains(other.name);
      });
}

std::vector<std::string> names_of(const std::vector<ParameterInfo>& list) {
  std::vector<std::string> names;
  for (const auto& info : list) names.push_back(info.name);
  return names;
}

}  // namespace

std::vector<std::string> weights_differences(
    const WeightsSource& weights, const std::vector<ParameterInfo>& parameters,
    const std::function<bool(const std::string& name)>& expected) {
  std::vector<TensorFacts> tensors;
  for (const auto& [name, tensor] : weights.tensors()) {
    tensors.push_back(tensor.facts);
  }
  return weights_differences(tensors, parameters, expected);
}

std::vector<std::string> weights_differences(
    const std::vector<TensorFacts>& tensors,
    const std::vector<ParameterInfo>& parameters,
    const std::function<bool(const std::string& name)>& expected) {
  ByName there;
  for (const auto& tensor : tensors) there[tensor.name] = &tensor;
  std::vector<std::string> lines;
  std::vector<std::string> unused;
  std::set<std::string> wanted;
  for (const auto& parameter : parameters) wanted.insert(parameter.name);
  for (const auto& [name, tensor] : there) {
    if (wanted.count(name) > 0) continue;
    if (expected && expected(name)) continue;
    unused.push_back(name);
  }
  for (const auto& parameter : parameters) {
    const auto found = there.find(parameter.name);
    if (found == there.end()) {
      if (may_be_missing(parameter)) continue;
      if (has_tied(there, parameters, parameter)) continue;
      const std::string guess = config::nearest(parameter.name, unused);
      lines.push_back(
          quoted(parameter.name) + " is missing" +
          (guess.empty() ? "" : "; the file has " + quoted(guess)));
      continue;
    }
    const TensorFacts* tensor = found->second;
    if (tensor->shape != parameter.shape) {
      lines.push_back(
          quoted(parameter.name) + " has shape " + shape_string(tensor->shape) +
          ", the model needs " + shape_string(parameter.shape));
    }
    const auto dtypes = accepted(parameter.dtype);
    if (std::find(dtypes.begin(), dtypes.end(), tensor->dtype) ==
        dtypes.end()) {
      lines.push_back(
          quoted(parameter.name) + " is " + tensor->dtype + ", the model's " +
          parameter.dtype + " needs " + dtypes.front());
    }
  }
  for (const auto& name : unused) {
    lines.push_back(quoted(name) + " is no tensor of the model");
  }
  return lines;
}

namespace {

void throw_differences(
    const std::vector<std::string>& lines, const std::string& place) {
  if (lines.empty()) return;
  const size_t shown = lines.size() <= 4 ? lines.size() : 3;
  std::string text = place + ": does not fit the model in " +
                     std::to_string(lines.size()) +
                     (lines.size() == 1 ? " place:" : " places:");
  for (size_t i = 0; i < shown; ++i) text += "\n  " + lines[i];
  if (shown < lines.size()) {
    text += "\n  and " + std::to_string(lines.size() - shown) + " more";
  }
  throw DataError(text);
}

}  // namespace

void check_weights(
    const std::string& path, const std::vector<ParameterInfo>& parameters,
    const std::string& place) {
  std::vector<std::string> lines;
  try {
    lines = weights_differences(
        WeightsSource(path, base_prefix(names_of(parameters))), parameters);
  } catch (const Error& error) {
    throw DataError(place + ": " + error.what());
  }
  throw_differences(lines, place);
}

void check_weights(
    const std::vector<TensorFacts>& tensors,
    const std::vector<ParameterInfo>& parameters, const std::string& place) {
  throw_differences(weights_differences(tensors, parameters), place);
}

}  // namespace echelon
