#include "echelon/architecture/check_weights.h"

#include <algorithm>
#include <map>
#include <set>

#include "echelon/architecture/trained_parameters.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/nearest.h"

namespace echelon {
namespace {

using safetensors::shape_string;

std::vector<std::string> accepted(const std::string& dtype) {
  if (dtype == "float64") return {"F64", "F32", "F16", "BF16"};
  if (dtype == "float32") return {"F32", "F16", "BF16"};
  return {"I64"};
}

// BatchNorm's counter of batches is used only without a momentum, which none
// of our models does; files of old PyTorch releases lack it.
// Adapters begin anew where a file has none.
bool may_be_missing(const ParameterInfo& parameter) {
  return is_adapter(parameter.name) ||
         (parameter.kind == ParameterInfo::Kind::buffer &&
          parameter.name.ends_with("num_batches_tracked"));
}

using ByName = std::map<std::string, const TensorFacts*>;

// The parameters that the file has under another of their names.
std::set<std::string> tied_there(
    const ByName& tensors, const std::vector<ParameterInfo>& parameters) {
  std::set<std::string> names;
  for (const auto& other : parameters) {
    if (tensors.contains(other.name)) names.insert(other.tied_to);
  }
  return names;
}

std::vector<std::string> names_of(const std::vector<ParameterInfo>& list) {
  std::vector<std::string> names;
  for (const auto& info : list) names.push_back(info.name);
  return names;
}

std::vector<std::string> differences(
    const std::vector<TensorFacts>& tensors,
    const std::vector<ParameterInfo>& parameters,
    const std::function<bool(const std::string& name)>& expected) {
  ByName there;
  for (const auto& tensor : tensors) there[tensor.name] = &tensor;
  std::vector<std::string> lines;
  std::vector<std::string> unused;
  const auto tied = tied_there(there, parameters);
  std::set<std::string> wanted;
  for (const auto& parameter : parameters) wanted.insert(parameter.name);
  for (const auto& [name, tensor] : there) {
    const bool known = wanted.contains(name) || (expected && expected(name));
    if (!known) unused.push_back(name);
  }
  for (const auto& parameter : parameters) {
    const auto found = there.find(parameter.name);
    if (found == there.end()) {
      if (may_be_missing(parameter)) continue;
      if (!parameter.tied_to.empty() || tied.contains(parameter.name)) continue;
      const std::string guess = config::nearest(parameter.name, unused);
      lines.push_back(
          format("\"{}\" is missing", parameter.name) +
          (guess.empty() ? "" : format("; the file has \"{}\"", guess)));
      continue;
    }
    const TensorFacts* tensor = found->second;
    if (tensor->shape != parameter.shape) {
      lines.push_back(format(
          "\"{}\" has shape {}, the model needs {}", parameter.name,
          shape_string(tensor->shape), shape_string(parameter.shape)));
    }
    const auto dtypes = accepted(parameter.dtype);
    if (std::ranges::count(dtypes, tensor->dtype) == 0) {
      lines.push_back(format(
          "\"{}\" is {}, the model's {} needs {}", parameter.name,
          tensor->dtype, parameter.dtype, dtypes.front()));
    }
  }
  for (const auto& name : unused) {
    lines.push_back(format("\"{}\" is no tensor of the model", name));
  }
  return lines;
}

void throw_differences(
    const std::vector<std::string>& lines, const std::string& place) {
  if (lines.empty()) return;
  const size_t shown = lines.size() <= 4 ? lines.size() : 3;
  std::string text = format(
      "{}: does not fit the model in {} {}:", place, lines.size(),
      lines.size() == 1 ? "place" : "places");
  for (size_t i = 0; i < shown; ++i) text += "\n  " + lines[i];
  if (shown < lines.size()) {
    text += format("\n  and {} more", lines.size() - shown);
  }
  throw DataError(text);
}

}  // namespace

std::vector<std::string> weights_differences(
    const WeightsSource& weights, const std::vector<ParameterInfo>& parameters,
    const std::function<bool(const std::string& name)>& expected) {
  std::vector<TensorFacts> tensors;
  for (const auto& [name, tensor] : weights.tensors()) {
    tensors.push_back(tensor.facts);
  }
  return differences(tensors, parameters, expected);
}

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
  throw_differences(differences(tensors, parameters, {}), place);
}

}  // namespace echelon
