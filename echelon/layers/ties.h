// Parameters of different layers that are one: groups of names, and finding
// them where nobody declared them.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "echelon/layers/layer_list.h"

namespace echelon {

/// One tensor under several names, in the order of the layers; the first name
/// is the one in checkpoints, and the one that the first values are drawn for.
struct TiedGroup {
  std::vector<std::string> names;
  std::vector<size_t> layers;  // the layer of each name
  bool operator==(const TiedGroup&) const = default;
};

/// The list's ties, joined: a to b and b to c is one group of three.
std::vector<TiedGroup> tied_groups(const LayerList& list);

/// The groups that more than one slice of `cut` holds, with one name and layer
/// for each of these slices: the name that the slice's Network has it under.
/// Their gradients are to be summed over these slices.
///
///   cut  boundaries, from 0 to list.size(), as layout/partition.h gives them
std::vector<TiedGroup>
tied_groups(const LayerList& list, const std::vector<size_t>& cut);

/// The same as pairs, each of a group's first with another.
std::vector<Tie>
ties_across(const LayerList& list, const std::vector<size_t>& cut);

/// The ties that nobody declared: parameters of different layers that share
/// their memory, since the functions that build them captured one module or
/// tensor. Builds every layer once, one after the other, so that it needs no
/// more memory than the largest; with build_on_meta (meta_mode.h) none. Throws
/// ConfigError when two share a part of their memory only, and when a declared
/// tie names what is no parameter, or two of different shapes.
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

/// A tie's name that is not among the parameters `known`.
[[noreturn]] void no_parameter_to_tie(
    const std::string& name, const std::vector<std::string>& known);

}  // namespace detail
}  // namespace echelon
