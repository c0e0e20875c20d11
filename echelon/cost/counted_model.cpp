#include "echelon/cost/model_shape.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "echelon/error.h"

namespace echelon::cost {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kMost = 1e30;

/// The figures of a layer by their keys, to write and to read.
template <class Layer>
auto figures(Layer& layer) {
  return std::array{
      std::pair{"forward_flops", &layer.forward_flops},
      std::pair{"backward_flops", &layer.backward_flops},
      std::pair{"parameters", &layer.parameters},
      std::pair{"kept_elements", &layer.kept_elements},
      std::pair{"moved_elements", &layer.moved_elements},
      std::pair{"output_elements", &layer.output_elements},
      std::pair{"rows", &layer.rows}};
}

template <class Layer>
auto counts(Layer& layer) {
  return std::array{
      std::pair{"inner", &layer.inner}, std::pair{"columns", &layer.columns},
      std::pair{"counted_samples", &layer.counted_samples}};
}

template <class Operator>
auto sizes(Operator& one) {
  return std::array{
      std::pair{"count", &one.count}, std::pair{"m", &one.m},
      std::pair{"n", &one.n}, std::pair{"k", &one.k}};
}

Json written(const CountedOperator& one) {
  Json json = {{"name", one.name}};
  if (one.product) {
    json["product"] = cluster::to_string(*one.product);
  } else {
    json["bytes"] = one.bytes;
  }
  if (one.product || one.count > 0) {
    for (const auto& [key, value] : sizes(one)) json[key] = *value;
  }
  if (one.collective) {
    json["collective"] = to_string(*one.collective);
    json["axis"] = short_name(one.axis);
  }
  if (one.one_weight) json["one_weight"] = true;
  if (one.causal) json["causal"] = true;
  if (one.launches != 1) json["launches"] = one.launches;
  if (one.for_weight) json["for_weight"] = true;
  if (one.accumulates) json["accumulates"] = true;
  return json;
}

Json written(const CountedLayer& layer) {
  Json json = {{"name", layer.name}};
  for (const auto& [key, value] : figures(layer)) json[key] = *value;
  for (const auto& [key, value] : counts(layer)) json[key] = *value;
  if (layer.stage >= 0) json["stage"] = layer.stage;
  for (const auto& [key, list] :
       {std::pair{"forward", &layer.forward},
        std::pair{"backward", &layer.backward}}) {
    json[key] = Json::array();
    for (const CountedOperator& one : *list) json[key].push_back(written(one));
  }
  return json;
}

class Reader {
 public:
  explicit Reader(std::string name) : place_(std::move(name)) {}

  ModelShape model(const Json& json) {
    const Json& list = member(json, "layers");
    ModelShape model{.name = text(json, "model")};
    model.seq_len = whole(json, "seq_len");
    if (json.contains("layer_ranks")) {
      model.layer_ranks = whole(json, "layer_ranks");
      if (model.layer_ranks < 1) fail("layer_ranks must be 1 or more");
    }
    if (!list.is_array() || list.empty())
      fail("layers must be a list of one or more");
    const std::string file = place_;
    for (const Json& one : list) {
      place_ = file + ": layer " + std::to_string(model.layers.size() + 1);
      model.layers.push_back(layer(one));
    }
    return model;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw DataError(
        place_ + ": " + what +
        "; echelon-train count CONFIG --json writes such files");
  }

  const Json& member(const Json& json, const char* key) const {
    if (!json.is_object() || !json.contains(key)) {
      fail(std::string("has no ") + key);
    }
    return json[key];
  }

  std::string text(const Json& json, const char* key) const {
    const Json& value = member(json, key);
    if (!value.is_string()) fail(std::string(key) + " must be a string");
    return value.get<std::string>();
  }

  double figure(const Json& json, const char* key) const {
    const Json& value = member(json, key);
    const double number = value.is_number() ? value.get<double>() : -1;
    if (!(number >= 0) || number > kMost) {
      fail(std::string(key) + " must be a number, 0 or more");
    }
    return number;
  }

  int64_t whole(const Json& json, const char* key) const {
    const double number = figure(json, key);
    if (number != std::floor(number) || number > 9e15) {
      fail(std::string(key) + " must be a whole number");
    }
    return static_cast<int64_t>(number);
  }

  cluster::ProductKind product(const Json& json) const {
    const std::string kind = text(json, "product");
    try {
      return cluster::product_kind_from_name(kind);
    } catch (const ConfigError& error) {
      fail(error.what());
    }
  }

  CollectiveKind collective(const std::string& name) const {
    const auto kind = collective_kind(name);
    if (!kind) fail("there is no collective \"" + name + "\"");
    return *kind;
  }

  Axis axis(const std::string& name) const {
    const auto found = std::ranges::find_if(
        kAxes, [&](Axis one) { return short_name(one) == name; });
    if (found == kAxes.end()) fail("there is no axis \"" + name + "\"");
    return *found;
  }

  CountedOperator counted(const Json& json) const {
    CountedOperator one{.name = text(json, "name")};
    if (json.contains("product")) {
      one.product = product(json);
      for (const auto& [key, value] : sizes(one)) *value = whole(json, key);
    } else {
      one.bytes = figure(json, "bytes");
    }
    if (json.contains("launches")) one.launches = whole(json, "launches");
    if (json.contains("collective")) {
      one.collective = collective(text(json, "collective"));
      one.axis = axis(text(json, "axis"));
      if (json.contains("count")) {
        for (const auto& [key, value] : sizes(one)) *value = whole(json, key);
      }
    }
    one.one_weight = json.contains("one_weight") && json["one_weight"] == true;
    one.causal = json.contains("causal") && json["causal"] == true;
    one.for_weight = json.contains("for_weight") && json["for_weight"] == true;
    one.accumulates =
        json.contains("accumulates") && json["accumulates"] == true;
    return one;
  }

  CountedLayer layer(const Json& json) const {
    CountedLayer layer{.name = text(json, "name")};
    for (const auto& [key, value] : figures(layer)) *value = figure(json, key);
    for (const auto& [key, value] : counts(layer)) *value = whole(json, key);
    if (json.contains("stage")) layer.stage = whole(json, "stage");
    for (const auto& [key, list] :
         {std::pair{"forward", &layer.forward},
          std::pair{"backward", &layer.backward}}) {
      const Json& operators = member(json, key);
      if (!operators.is_array()) fail(std::string(key) + " must be a list");
      for (const Json& one : operators) list->push_back(counted(one));
    }
    return layer;
  }

  std::string place_;
};

}  // namespace

std::string counted_model_json(const ModelShape& model) {
  Json json = {
      {"model", model.name},
      {"seq_len", model.seq_len},
      {"layers", Json::array()}};
  if (model.layer_ranks > 1) json["layer_ranks"] = model.layer_ranks;
  for (const CountedLayer& layer : model.layers) {
    json["layers"].push_back(written(layer));
  }
  return json.dump(1);
}

ModelShape
parse_counted_model(const std::string& text, const std::string& name) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) {
    throw DataError(
        name +
        ": is no JSON; echelon-train count CONFIG --json writes such files");
  }
  return Reader(name).model(json);
}

ModelShape read_counted_model(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) {
    throw DataError(path.string() + ": no such file, or it cannot be read");
  }
  return parse_counted_model(text.str(), path.string());
}

}  // namespace echelon::cost
