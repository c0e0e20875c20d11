#include "echelon/models/layer_list.h"

#include <algorithm>

#include "echelon/config/nearest.h"

namespace echelon {
namespace {

bool well_formed(const std::string& name) {
  return !name.empty() && name.front() != '.' && name.back() != '.' &&
         name.find("..") == std::string::npos;
}

std::string in_quotes(const std::string& name) {
  return "\"" + name + "\"";
}

}  // namespace

namespace detail {

void wrong_number_of_tensors(
    const std::string& layer, size_t taken, size_t given) {
  throw ConfigError(
      "layer " + in_quotes(layer) + " takes " + std::to_string(taken) +
      (taken == 1 ? " tensor" : " tensors") + " and is given " +
      std::to_string(given) +
      "; let the layer before it return as many, or let this one take Tensors");
}

}  // namespace detail

LayerList& LayerList::add_definition(LayerDefinition layer) {
  if (!well_formed(layer.name)) {
    throw ConfigError(
        "a layer's name is " + in_quotes(layer.name) +
        "; it must not be empty, nor any part of it between dots");
  }
  for (const auto& other : layers_) {
    if (other.name == layer.name ||
        other.name.starts_with(layer.name + ".") ||
        layer.name.starts_with(other.name + ".")) {
      throw ConfigError(
          "layer " + in_quotes(layer.name) + " is added to a list that has " +
          in_quotes(other.name) +
          "; names must differ, and none may be the beginning of another");
    }
  }
  layers_.push_back(std::move(layer));
  return *this;
}

LayerList& LayerList::tie(
    const std::string& first, const std::string& second) {
  const size_t a = layer_of_parameter(first);
  const size_t b = layer_of_parameter(second);
  if (a == b) {
    throw ConfigError(
        "tie " + in_quotes(first) + " to " + in_quotes(second) +
        ": both are in layer " + in_quotes(layers_[a].name) +
        "; share the tensor inside of the module instead");
  }
  ties_.push_back(a < b ? Tie{first, second} : Tie{second, first});
  return *this;
}

size_t LayerList::index_of(const std::string& name) const {
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (layers_[i].name == name) return i;
  }
  throw ConfigError(
      "no layer is called " + in_quotes(name) +
      config::did_you_mean(name, names()));
}

size_t LayerList::layer_of_parameter(const std::string& name) const {
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (name.starts_with(layers_[i].name + ".")) return i;
  }
  throw ConfigError(
      "no layer has a parameter " + in_quotes(name) +
      "; it is written \"layer.parameter\", after the layer was added");
}

std::vector<std::string> LayerList::names() const {
  std::vector<std::string> names;
  for (const auto& layer : layers_) names.push_back(layer.name);
  return names;
}

}  // namespace echelon
