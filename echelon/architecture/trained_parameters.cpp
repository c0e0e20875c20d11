#include "echelon/architecture/trained_parameters.h"

#include <fnmatch.h>

#include <algorithm>
#include <cmath>

#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/nearest.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

bool matches(const std::string& pattern, const std::string& name) {
  return ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

const std::string& first_name(const ParameterInfo& info) {
  return info.tied_to.empty() ? info.name : info.tied_to;
}

// What a pattern could be: each name, and each part of one before a dot with a
// star behind it.
std::vector<std::string>
possible_patterns(const std::vector<std::string>& names) {
  std::set<std::string> all(names.begin(), names.end());
  for (const auto& name : names) {
    for (size_t dot = name.find('.'); dot != std::string::npos;
         dot = name.find('.', dot + 1)) {
      all.insert(name.substr(0, dot) + ".*");
    }
  }
  return {all.begin(), all.end()};
}

[[noreturn]] void
refuse(const std::string& pattern, const std::vector<std::string>& names) {
  const auto near = config::did_you_mean(pattern, possible_patterns(names));
  throw ConfigError(format(
      "[model] freeze has \"{}\", which matches none of the {}{}", pattern,
      counted(static_cast<int64_t>(names.size()), "parameter"),
      near.empty() ? format(
                         "; the first is \"{}\", the last \"{}\"",
                         names.front(), names.back())
                   : near));
}

// The linear layers that can have adapters.
std::vector<std::string> linear_layers(const std::vector<ParameterInfo>& list) {
  constexpr std::string_view kWeight = ".weight";
  std::vector<std::string> names;
  for (const auto& info : list) {
    if (!info.takes_adapter) continue;
    names.push_back(info.name.substr(0, info.name.size() - kWeight.size()));
  }
  return names;
}

// Whether `target` names the layer: by its name, its last parts, or a pattern.
bool names_layer(const std::string& target, const std::string& layer) {
  return matches(target, layer) || layer.ends_with("." + target);
}

[[noreturn]] void refuse_target(
    const std::string& target, const std::vector<std::string>& layers) {
  std::set<std::string> ends;
  for (const auto& layer : layers)
    ends.insert(layer.substr(layer.rfind('.') + 1));
  std::vector<std::string> candidates(ends.begin(), ends.end());
  const auto short_names = candidates;
  candidates.insert(candidates.end(), layers.begin(), layers.end());
  throw ConfigError(format(
      "[lora] targets has \"{}\", which names no linear layer that can have "
      "adapters{}; there are {}",
      target, config::did_you_mean(target, candidates),
      join(short_names, ", ")));
}

}  // namespace

bool is_adapter(std::string_view parameter) {
  return parameter.ends_with(kAdapterA) || parameter.ends_with(kAdapterB);
}

std::vector<std::string> adapted_layers(
    const LoraOptions& lora, const std::vector<ParameterInfo>& list) {
  const auto layers = linear_layers(list);
  if (!lora.used()) return {};
  if (lora.targets.empty()) {
    throw ConfigError(format(
        "[lora] rank={} without targets; name the linear layers that get "
        "adapters, such as targets = [\"{}\"]",
        lora.rank, layers.front().substr(layers.front().rfind('.') + 1)));
  }
  for (const auto& target : lora.targets) {
    if (std::ranges::none_of(layers, [&](const auto& layer) {
          return names_layer(target, layer);
        })) {
      refuse_target(target, layers);
    }
  }
  std::vector<std::string> adapted;
  for (const auto& layer : layers) {
    if (std::ranges::any_of(lora.targets, [&](const auto& target) {
          return names_layer(target, layer);
        })) {
      adapted.push_back(layer);
    }
  }
  return adapted;
}

std::vector<ParameterInfo> with_adapters(
    const LoraOptions& lora, std::vector<ParameterInfo> list, bool in_by_out) {
  const auto adapted = adapted_layers(lora, list);
  const std::set<std::string> names(adapted.begin(), adapted.end());
  std::vector<ParameterInfo> all;
  for (size_t i = 0; i < list.size(); ++i) {
    const auto& info = list[i];
    all.push_back(info);
    // The adapters follow the layer's last parameter: its bias, if it has one.
    const std::string layer = info.name.substr(0, info.name.rfind('.'));
    const bool is_last =
        i + 1 == list.size() || !list[i + 1].name.starts_with(layer + ".");
    if (!names.contains(layer) || !is_last) continue;
    const auto& matrix = info.shape.size() == 2 ? info : list[i - 1];
    const int64_t in = matrix.shape[in_by_out ? 0 : 1];
    const int64_t out = matrix.shape[in_by_out ? 1 : 0];
    all.push_back(
        {.name = layer + std::string(kAdapterA),
         .shape = {lora.rank, in},
         .dtype = matrix.dtype,
         .initial =
             InitialValue::normal_of(1 / std::sqrt(static_cast<double>(in)))});
    all.push_back(
        {.name = layer + std::string(kAdapterB),
         .shape = {out, lora.rank},
         .dtype = matrix.dtype,
         .initial = InitialValue::constant_of(0)});
  }
  return all;
}

bool saves_adapters_alone(const ModelOptions& options) {
  return options.lora.used() && !options.weights.empty();
}

std::set<std::string> frozen_parameters(
    const ModelOptions& options, const std::vector<ParameterInfo>& list) {
  const bool adapts = options.lora.used();
  if (options.freeze.empty() && !adapts) return {};
  std::vector<std::string> names;
  for (const auto& info : list) {
    if (info.kind == ParameterInfo::Kind::parameter) names.push_back(info.name);
  }
  std::set<std::string> matched;
  for (const auto& name : names) {
    if (adapts && !is_adapter(name)) matched.insert(name);
  }
  for (const auto& pattern : options.freeze) {
    bool any = false;
    for (const auto& name : names) {
      if (!matches(pattern, name)) continue;
      matched.insert(name);
      any = true;
    }
    if (!any) refuse(pattern, names);
  }
  std::set<std::string> first;
  for (const auto& info : list) {
    if (matched.contains(info.name)) first.insert(first_name(info));
  }
  std::set<std::string> frozen;
  for (const auto& info : list) {
    if (first.contains(first_name(info))) frozen.insert(info.name);
  }
  if (frozen.size() == names.size()) {
    throw ConfigError(format(
        "[model] freeze matches all {}, so nothing would train; leave out a "
        "pattern",
        adapts ? "adapters" : format("{} parameters", names.size())));
  }
  return frozen;
}

}  // namespace echelon
