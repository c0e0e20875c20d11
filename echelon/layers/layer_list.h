// A model as an ordered list of layers, each of which is built only on the
// ranks that hold it. Pipeline stages, device placements, shard units and cost
// counts refer to slices of the list.
//
//   LayerList layers("two_blocks");
//   layers.add("embed", [] { return torch::nn::Embedding(1000, 64); });
//   layers.add("block", [] { return Block(64); });        // forward(x, skip)
//   layers.add("head", [] { return torch::nn::Linear(64, 1000); });
//   layers.tie("embed.weight", "head.weight");
//
// A layer takes the tuple of tensors that the layer before it returned, so a
// skip connection, a mask or a side output passes along, across any stage
// boundary. network.h builds a list, or a slice of it; ties.h has the tied
// parameters.
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

/// The computation of a layer.
using LayerForward = std::function<Tensors(const Tensors&)>;

/// A layer after it was built.
struct BuiltLayer {
  /// Holds the parameters; null when there are none.
  std::shared_ptr<torch::nn::Module> module;
  LayerForward forward;
};

/// A layer as the list describes it.
struct LayerDefinition {
  /// Unique in its list, without an empty part between dots. It is the prefix
  /// of the names of the layer's parameters: "layer1.0" + "." + "conv1.weight".
  std::string name;
  /// Called by each rank that holds the layer, and on the meta device to count
  /// or compare layers. Each call builds a new layer.
  std::function<BuiltLayer()> build;
  /// Writes initial values that depend only on `seed` and the parameters' full
  /// names. Null: parameters keep the values that `build` draws, from a seeded
  /// generator, and sharded ones get those of their shards (sharded_module.h).
  std::function<void(torch::nn::Module& module, uint64_t seed)> initialize;
};

/// Two names of one parameter that different layers share.
struct Tie {
  std::string first;   // the name in checkpoints
  std::string second;  // of a later layer
  bool operator==(const Tie&) const = default;
};

/// A value; copies share the functions. Errors are ConfigErrors that name the
/// layer.
class LayerList {
 public:
  LayerList() = default;
  /// With the model's name, as reports say it.
  explicit LayerList(std::string name) : name_(std::move(name)) {}

  /// Empty unless it was given.
  const std::string& name() const { return name_; }

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

  /// The same with a separate forward:
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

  /// Adds a layer without parameters. `function` takes and returns what a
  /// module's forward may.
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

  /// Declares that two parameters ("layer.parameter") are one: they start equal
  /// and their gradients are summed, whichever ranks hold the layers. Throws
  /// when a name's layer is not in the list yet; shapes are compared when the
  /// layers are built.
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
  std::string name_;
  std::vector<LayerDefinition> layers_;
  std::vector<Tie> ties_;
};

/// Returns forward(inputs). Errors of LibTorch and a wrong number of tensors
/// become ConfigErrors that name the layer, the producer of its inputs, and
/// their dtypes and shapes. Other errors pass unchanged.
///
///   producer  the layer that returned `inputs`; empty: the model's input
Tensors run_layer(
    const std::string& name,
    const std::function<Tensors(const Tensors&)>& forward,
    const Tensors& inputs, const std::string& producer);

/// "float32 [4, 64] and int64 [4]".
std::string describe(const Tensors& tensors);

}  // namespace echelon
