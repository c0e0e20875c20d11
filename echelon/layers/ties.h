// Tied parameters, which layers share: groups of their names, and how to find
// those that were not declared.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "echelon/layers/layer_list.h"

namespace echelon {

/// One tensor under several names, in the order of the layers. The first name
/// is the one in checkpoints, and the one that determines the initial values.
struct TiedGroup {
  std::vector<std::string> names;
  std::vector<size_t> layers;  // the layer of each name
  bool operator==(const TiedGroup&) const = default;
};

/// The list's ties, joined: a to b and b to c make one group of three.
std::vector<TiedGroup> tied_groups(const LayerList& list);

/// The groups that more than one slice of the partition holds, with one name
/// and layer for each of these slices: the name that the slice's Network uses.
/// Their gradients must be summed over these slices.
///
///   boundaries  from 0 to list.size(), as layout/partition.h gives them
std::vector<TiedGroup>
tied_groups(const LayerList& list, const std::vector<size_t>& boundaries);

/// The same as pairs: the first of a group with each other one.
std::vector<Tie>
ties_across(const LayerList& list, const std::vector<size_t>& boundaries);

/// The ties that were not declared: parameters of different layers that share
/// their memory, because the functions that build them captured one module or
/// tensor. Builds the layers one after the other, so that it needs no more
/// memory than the largest; with build_on_meta (meta_mode.h) it needs none.
/// Throws ConfigError when two parameters share only a part of their memory,
/// and when a declared tie names no parameter, or two of different shapes.
///
///   for (const auto& tie : find_ties(list)) list.tie(tie.first, tie.second);
std::vector<Tie> find_ties(
    const LayerList& list,
    const std::function<BuiltLayer(const LayerDefinition&)>& build =
        [](const LayerDefinition& layer) { return layer.build(); });

namespace detail {

/// Throws ConfigError that names both unless the shapes are equal.
void check_tied_shapes(
    const std::string& first, at::IntArrayRef first_shape,
    const std::string& second, at::IntArrayRef second_shape);

/// Throws for a tie's name that is not among the parameters `known`.
[[noreturn]] void no_parameter_to_tie(
    const std::string& name, const std::vector<std::string>& known);

}  // namespace detail
}  // namespace echelon
