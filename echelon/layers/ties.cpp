// find_ties() builds the layers and compares the memory of their parameters:
// parameters of different layers are tied when they have the same memory,
// shape, strides and dtype, and are refused when they share a part of it.
// Groups are made by numbers: a tie gives all names of both groups one number.
#include "echelon/layers/ties.h"

#include <c10/core/StorageImpl.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/nearest.h"

namespace echelon {
namespace {

// The memory of a parameter. The weak pointer prevents another storage from
// getting the same address after this one is freed.
struct ParameterMemory {
  std::string name;
  size_t layer;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  int64_t begin;  // bytes
  int64_t end;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  torch::ScalarType dtype;
};

std::string with_shape(const std::string& name, at::IntArrayRef shape) {
  return c10::str("\"", name, "\" of shape ", shape);
}

int64_t last_element(const torch::Tensor& tensor) {
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return last;
}

std::vector<ParameterMemory>
memory_of(const std::string& layer, size_t index, const BuiltLayer& built) {
  std::vector<ParameterMemory> places;
  if (built.module == nullptr) return places;
  for (const auto& item : built.module->named_parameters()) {
    const torch::Tensor& tensor = item.value();
    const auto bytes = static_cast<int64_t>(tensor.element_size());
    places.push_back(
        {.name = layer + "." + item.key(),
         .layer = index,
         .storage = tensor.storage().getWeakStorageImpl(),
         .begin = tensor.storage_offset() * bytes,
         .end = tensor.numel() == 0 ? 0 : (last_element(tensor) + 1) * bytes,
         .sizes = tensor.sizes().vec(),
         .strides = tensor.strides().vec(),
         .dtype = tensor.scalar_type()});
  }
  return places;
}

// Whether two parameters of different layers are the same.
bool are_same(const ParameterMemory& a, const ParameterMemory& b) {
  if (a.layer == b.layer || a.begin >= b.end || b.begin >= a.end) return false;
  if (a.begin == b.begin && a.sizes == b.sizes && a.strides == b.strides &&
      a.dtype == b.dtype) {
    return true;
  }
  throw ConfigError(format(
      "{} shares a part of its memory with {}; parameters of different layers "
      "are one or have nothing in common",
      with_shape(a.name, a.sizes), with_shape(b.name, b.sizes)));
}

void check_declared(
    const LayerList& list,
    const std::map<std::string, std::vector<int64_t>>& shapes) {
  for (const auto& tie : list.ties()) {
    for (const auto* name : {&tie.first, &tie.second}) {
      if (shapes.contains(*name)) continue;
      std::vector<std::string> known;
      for (const auto& item : shapes) known.push_back(item.first);
      detail::no_parameter_to_tie(*name, known);
    }
    detail::check_tied_shapes(
        tie.first, shapes.at(tie.first), tie.second, shapes.at(tie.second));
  }
}

bool in_one_group(
    const std::vector<TiedGroup>& groups, const std::string& a,
    const std::string& b) {
  return std::ranges::any_of(groups, [&](const auto& group) {
    return std::ranges::count(group.names, a) > 0 &&
           std::ranges::count(group.names, b) > 0;
  });
}

}  // namespace

std::vector<TiedGroup> tied_groups(const LayerList& list) {
  std::map<std::string, size_t> number;  // name -> its group
  for (const auto& tie : list.ties()) {
    const size_t fresh = number.size();
    const size_t a = number.emplace(tie.first, fresh).first->second;
    const size_t b = number.emplace(tie.second, a).first->second;
    for (auto& item : number) {
      if (item.second == b) item.second = a;
    }
  }
  std::map<size_t, std::vector<std::pair<size_t, std::string>>> members;
  for (const auto& [name, group] : number) {
    members[group].emplace_back(list.layer_of_parameter(name), name);
  }
  std::vector<TiedGroup> groups;
  for (auto& item : members) {
    std::sort(item.second.begin(), item.second.end());
    TiedGroup group;
    for (auto& [layer, name] : item.second) {
      group.names.push_back(name);
      group.layers.push_back(layer);
    }
    groups.push_back(std::move(group));
  }
  std::sort(groups.begin(), groups.end(), [](const auto& a, const auto& b) {
    return std::tie(a.layers, a.names) < std::tie(b.layers, b.names);
  });
  return groups;
}

std::vector<TiedGroup>
tied_groups(const LayerList& list, const std::vector<size_t>& boundaries) {
  if (boundaries.size() < 2 || boundaries.front() != 0 ||
      boundaries.back() != list.size() || !std::ranges::is_sorted(boundaries)) {
    throw ConfigError(format(
        "a partition of {} layers is given as boundaries that do not go from 0 "
        "to {}",
        list.size(), list.size()));
  }
  std::vector<TiedGroup> across;
  for (const auto& group : tied_groups(list)) {
    TiedGroup part;
    std::optional<std::ptrdiff_t> slice;
    for (size_t i = 0; i < group.names.size(); ++i) {
      const auto at = std::ranges::upper_bound(boundaries, group.layers[i]) -
                      boundaries.begin();
      if (slice == at) continue;
      slice = at;
      part.names.push_back(group.names[i]);
      part.layers.push_back(group.layers[i]);
    }
    if (part.names.size() > 1) across.push_back(std::move(part));
  }
  return across;
}

std::vector<Tie>
ties_across(const LayerList& list, const std::vector<size_t>& boundaries) {
  std::vector<Tie> ties;
  for (const auto& group : tied_groups(list, boundaries)) {
    for (size_t i = 1; i < group.names.size(); ++i) {
      ties.push_back({group.names[0], group.names[i]});
    }
  }
  return ties;
}

std::vector<Tie> find_ties(
    const LayerList& list,
    const std::function<BuiltLayer(const LayerDefinition&)>& build) {
  std::map<std::string, std::vector<int64_t>> shapes;
  std::map<c10::StorageImpl*, std::vector<ParameterMemory>> by_storage;
  for (size_t i = 0; i < list.size(); ++i) {
    for (auto& place : memory_of(list[i].name, i, build(list[i]))) {
      shapes[place.name] = place.sizes;
      by_storage[place.storage._unsafe_get_target()].push_back(
          std::move(place));
    }
  }
  check_declared(list, shapes);

  LayerList all = list;
  std::vector<Tie> found;
  for (const auto& item : by_storage) {
    const auto& sharing = item.second;  // in the order of layers
    for (auto place = sharing.begin(); place != sharing.end(); ++place) {
      const auto first = std::find_if(
          sharing.begin(), place, [&](const ParameterMemory& earlier) {
            return are_same(earlier, *place);
          });
      if (first == place) continue;
      if (in_one_group(tied_groups(all), first->name, place->name)) continue;
      found.push_back({first->name, place->name});
      all.tie(first->name, place->name);
    }
  }
  std::sort(found.begin(), found.end(), [&](const Tie& a, const Tie& b) {
    const auto key = [&](const Tie& tie) {
      return std::make_tuple(
          list.layer_of_parameter(tie.first),
          list.layer_of_parameter(tie.second), tie.first, tie.second);
    };
    return key(a) < key(b);
  });
  return found;
}

namespace detail {

void check_tied_shapes(
    const std::string& first, at::IntArrayRef first_shape,
    const std::string& second, at::IntArrayRef second_shape) {
  if (first_shape == second_shape) return;
  throw ConfigError(format(
      "{} is tied to {}; tied parameters are one, so their shapes must be "
      "equal",
      with_shape(first, first_shape), with_shape(second, second_shape)));
}

void no_parameter_to_tie(
    const std::string& name, const std::vector<std::string>& known) {
  throw ConfigError(format(
      "a tie names \"{}\", which is no parameter of its layer{}", name,
      config::did_you_mean(name, known)));
}

}  // namespace detail
}  // namespace echelon
