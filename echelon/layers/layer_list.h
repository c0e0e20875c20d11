// A model as an ordered list of layers that are built only where they live:
// what pipeline stages, device placements, shard units and cost counts are
// slices of.
//
//   LayerList layers;
//   layers.add("embed", [] { return torch::nn::Embedding(1000, 64); });
//   layers.add("block", [] { return Block(64); });        // forward(x, skip)
//   layers.add("head", [] { return torch::nn::Linear(64, 1000); });
//   layers.tie("embed.weight", "head.weight");
//
// A layer takes the tuple of tensors that the layer before it returned, so a
// skip connection, a mask or a side output travels along, across any cut.
// network.h builds a list, or a slice of it; ties.h has the tied parameters.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "echelon/error.h"
#include "echelon/layers/layer_call.h"

namespace echelon {

/// What a layer computes.
using LayerForward = std::function<Tensors(const Tensors&)>;

/// A layer that exists.
struct BuiltLayer {
  /// Holds its parameters; null when there are none.
  std::shared_ptr<torch::nn::Module> module;
  LayerForward forward;
};

/// A layer as the list knows it.
struct LayerDefinition {
  /// Unique in its list, without an empty part between dots. Parameters of the
  /// layer are called by it: "layer1.0" + "." + "conv1.weight".
  std::string name;
  /// Called by each rank that the layer lives on, and under a meta device by
  /// whoever counts or compares layers; each call builds a new one.
  std::function<BuiltLayer()> build;
  /// Writes first values that depend on `seed` and the parameters' full names
  /// alone. Null: those that `build` draws, from the generator that it is
  /// given; of cut parameters, those that their shards say (sharded_module.h).
  std::function<void(torch::nn::Module& module, uint64_t seed)> initialize;
};

/// Two parameters of different layers that are one.
struct Tie {
  std::string first;   // the one that owns the name in checkpoints
  std::string second;  // of a later layer
  bool operator==(const Tie&) const = default;
};

/// A value; copies share the functions. Errors are ConfigErrors that name the
/// layer.
class LayerList {
 public:
  /// `build` returns a torch::nn module (a holder or a shared_ptr). Its forward
  /// takes 1 to 8 tensors (other arguments may follow that have defaults), or
  /// Tensors, and returns a tensor, a std::tuple of them or Tensors. Throws for
  /// a name that is taken or malformed.
  template <class Build>
  requires std::is_invocable_v<Build> LayerList&
  add(const std::string& name, Build build) {
    return add_definition(
        {name, [name, build = std::move(build)]() -> BuiltLayer {
           const detail::ForwardOf forward{detail::module_of(build())};
           return {forward.module, [name, forward](const Tensors& inputs) {
                     return detail::call_layer(name, forward, inputs);
                   }};
         }});
  }

  /// The same with a forward of its own:
  ///
  ///   layers.add(
  ///       "fc",
  ///       [] { return torch::nn::Linear(64, 10); },
  ///       [](auto& fc, torch::Tensor x) { return fc.forward(x.flatten(1)); });
  ///
  ///   forward  called with the module (not its holder) and the tensors
  template <class Build, class Forward>
  requires std::is_invocable_v<Build> LayerList&
  add(const std::string& name, Build build, Forward forward) {
    return add_definition(
        {name, [name, build = std::move(build), forward]() -> BuiltLayer {
           const detail::BoundForward bound{
               detail::module_of(build()), forward};
           return {bound.module, [name, bound](const Tensors& inputs) {
                     return detail::call_layer(name, bound, inputs);
                   }};
         }});
  }

  /// A layer without parameters: `function` is a lambda like a module's
  /// forward.
  template <class Function>
  LayerList& add_function(const std::string& name, Function function) {
    return add_definition(
        {name, [name, function]() -> BuiltLayer {
           return {nullptr, [name, function](const Tensors& inputs) {
                     return detail::call_layer(name, function, inputs);
                   }};
         }});
  }

  /// The general form.
  LayerList& add_definition(LayerDefinition layer);

  /// The two parameters ("layer.parameter") are one: they start equal, and
  /// their gradients are summed, wherever the layers live. Throws when a name's
  /// layer is not in the list yet; shapes are compared when the layers are
  /// built.
  LayerList& tie(const std::string& first, const std::string& second);

  size_t size() const { return layers_.size(); }
  const LayerDefinition& operator[](size_t index) const {
    return layers_[index];
  }
  const std::vector<LayerDefinition>& layers() const { return layers_; }
  const std::vector<Tie>& ties() const { return ties_; }

  /// The index of the layer called `name`; throws with the nearest name.
  size_t index_of(const std::string& name) const;
  /// The index of the layer that the parameter `name` belongs to.
  size_t layer_of_parameter(const std::string& name) const;
  std::vector<std::string> names() const;

 private:
  std::vector<LayerDefinition> layers_;
  std::vector<Tie> ties_;
};

/// layer.forward(inputs), with errors that say where: what LibTorch throws, and
/// a wrong number of tensors, become ConfigErrors that name the layer, the one
/// that made its inputs, and their dtypes and shapes. Others pass as they are.
///
///   giver  the name of the layer that returned `inputs`; empty: the model's
///   input
Tensors run_layer(
    const std::string& name,
    const std::function<Tensors(const Tensors&)>& forward,
    const Tensors& inputs, const std::string& giver);

/// "float32 [4, 64] and int64 [4]".
std::string describe(const Tensors& tensors);

}  // namespace echelon
