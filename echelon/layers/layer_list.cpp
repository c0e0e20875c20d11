#include "echelon/layers/layer_list.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "echelon/text/format.h"
#include "echelon/text/nearest.h"

namespace echelon {
namespace {

bool well_formed(const std::string& name) {
  return !name.empty() && name.front() != '.' && name.back() != '.' &&
         name.find("..") == std::string::npos;
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
  throw WrongNumberOfTensors(format(
      "layer \"{}\" takes {} {} and is given {}", layer, counts,
      taken == std::vector<size_t>{1} ? "tensor" : "tensors", given));
}

void check_outputs(const std::string& layer, const Tensors& outputs) {
  if (outputs.empty()) {
    throw ConfigError(format(
        "layer \"{}\" returns no tensor; let it return one or more", layer));
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i].defined()) continue;
    throw ConfigError(format(
        "layer \"{}\" returns {} tensors, of which number {} is undefined; "
        "leave it out, or return an empty one",
        layer, outputs.size(), i + 1));
  }
}

std::string first_line(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  const std::string text =
      of_torch != nullptr ? of_torch->what_without_backtrace() : error.what();
  return text.substr(0, text.find('\n'));
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
    text += c10::str(
        c10::getDtypeNames(tensors[i].scalar_type()).first, " ",
        tensors[i].sizes());
  }
  return text.empty() ? "no tensor" : text;
}

Tensors run_layer(
    const std::string& name,
    const std::function<Tensors(const Tensors&)>& forward,
    const Tensors& inputs, const std::string& producer) {
  const auto given = [&] {
    return (producer.empty() ? "the input"
                             : format("what layer \"{}\" returns", producer)) +
           ", " + describe(inputs);
  };
  try {
    return forward(inputs);
  } catch (const detail::WrongNumberOfTensors& error) {
    throw ConfigError(format(
        "{}: {}; {}", error.what(), given(),
        producer.empty() ? "give it as many, or let it take Tensors"
                         : "let that one return as many, or this one take "
                           "Tensors"));
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::AcceleratorError&) {
    throw;
  } catch (const c10::DistError&) {
    throw;
  } catch (const c10::Error& error) {
    throw ConfigError(format(
        "layer \"{}\" cannot take {}: {}", name, given(),
        detail::first_line(error)));
  }
}

LayerList& LayerList::add_definition(LayerDefinition layer) {
  if (!well_formed(layer.name)) {
    throw ConfigError(format(
        "a layer's name is \"{}\"; it must not be empty, nor any part of it "
        "between dots",
        layer.name));
  }
  for (const auto& other : layers_) {
    if (other.name == layer.name || other.name.starts_with(layer.name + ".") ||
        layer.name.starts_with(other.name + ".")) {
      throw ConfigError(format(
          "layer \"{}\" is added to a list that has \"{}\"; names must differ, "
          "and none may be the beginning of another",
          layer.name, other.name));
    }
  }
  layers_.push_back(std::move(layer));
  return *this;
}

LayerList& LayerList::tie(const std::string& first, const std::string& second) {
  const size_t a = layer_of_parameter(first);
  const size_t b = layer_of_parameter(second);
  if (a == b) {
    throw ConfigError(format(
        "tie \"{}\" to \"{}\": both are in layer \"{}\"; share the tensor "
        "inside "
        "of the module instead",
        first, second, layers_[a].name));
  }
  ties_.push_back(a < b ? Tie{first, second} : Tie{second, first});
  return *this;
}

size_t LayerList::index_of(const std::string& name) const {
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (layers_[i].name == name) return i;
  }
  throw ConfigError(format(
      "no layer is called \"{}\"{}", name,
      config::did_you_mean(name, names())));
}

size_t LayerList::layer_of_parameter(const std::string& name) const {
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (name.starts_with(layers_[i].name + ".")) return i;
  }
  throw ConfigError(format(
      "no layer has a parameter \"{}\"; it is written \"layer.parameter\", "
      "after "
      "the layer was added",
      name));
}

std::vector<std::string> LayerList::names() const {
  std::vector<std::string> names;
  for (const auto& layer : layers_) names.push_back(layer.name);
  return names;
}

}  // namespace echelon
