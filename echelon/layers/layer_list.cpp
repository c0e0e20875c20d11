#include "echelon/layers/layer_list.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "echelon/text/nearest.h"

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
    const std::string& layer, const std::vector<size_t>& taken, size_t given) {
  std::string counts;
  for (size_t i = 0; i < taken.size(); ++i) {
    if (i > 0) counts += i + 1 < taken.size() ? ", " : " or ";
    counts += std::to_string(taken[i]);
  }
  throw WrongNumberOfTensors(
      "layer " + in_quotes(layer) + " takes " + counts +
      (taken == std::vector<size_t>{1} ? " tensor" : " tensors") +
      " and is given " + std::to_string(given));
}

void check_outputs(const std::string& layer, const Tensors& outputs) {
  if (outputs.empty()) {
    throw ConfigError(
        "layer " + in_quotes(layer) +
        " returns no tensor; let it return one or more");
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i].defined()) continue;
    throw ConfigError(
        "layer " + in_quotes(layer) + " returns " +
        std::to_string(outputs.size()) + " tensors, of which number " +
        std::to_string(i + 1) +
        " is undefined; leave it out, or return an empty one");
  }
}

}  // namespace detail

std::string describe(const Tensors& tensors) {
  std::string text;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (i > 0) text += i + 1 < tensors.size() ? ", " : " and ";
    if (!tensors[i].defined()) {
      text += "an undefined tensor";
      continue;
    }
    text += c10::getDtypeNames(tensors[i].scalar_type()).first + " [";
    for (int64_t dim = 0; dim < tensors[i].dim(); ++dim) {
      text += (dim == 0 ? "" : ", ") + std::to_string(tensors[i].size(dim));
    }
    text += "]";
  }
  return text.empty() ? "no tensor" : text;
}

Tensors run_layer(
    const std::string& name,
    const std::function<Tensors(const Tensors&)>& forward,
    const Tensors& inputs, const std::string& giver) {
  const auto given = [&] {
    return (giver.empty() ? "the input"
                          : "what layer " + in_quotes(giver) + " returns") +
           ", " + describe(inputs);
  };
  try {
    return forward(inputs);
  } catch (const detail::WrongNumberOfTensors& error) {
    throw ConfigError(
        std::string(error.what()) + ": " + given() +
        (giver.empty() ? "; give it as many, or let it take Tensors"
                       : "; let that one return as many, or this one take "
                         "Tensors"));
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::AcceleratorError&) {
    throw;
  } catch (const c10::DistError&) {
    throw;
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    throw ConfigError(
        "layer " + in_quotes(name) + " cannot take " + given() + ": " +
        text.substr(0, text.find('\n')));
  }
}

LayerList& LayerList::add_definition(LayerDefinition layer) {
  if (!well_formed(layer.name)) {
    throw ConfigError(
        "a layer's name is " + in_quotes(layer.name) +
        "; it must not be empty, nor any part of it between dots");
  }
  for (const auto& other : layers_) {
    if (other.name == layer.name || other.name.starts_with(layer.name + ".") ||
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

LayerList& LayerList::tie(const std::string& first, const std::string& second) {
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
