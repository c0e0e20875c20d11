// A model as an ordered list of layers that are built only where they live: what
// pipeline stages, device placements, shard units and cost counts are slices of.
//
//   LayerList layers;
//   layers.add("embed", [] { return torch::nn::Embedding(1000, 64); });
//   layers.add("block", [] { return Block(64); });        // forward(x, skip)
//   layers.add("head", [] { return torch::nn::Linear(64, 1000); });
//   layers.tie("embed.weight", "head.weight");
//
// A layer takes the tuple of tensors that the layer before it returned, so a
// skip connection, a mask or a side output travels along, across any cut.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "echelon/error.h"

namespace echelon {

/// What passes from a layer to the next: a small tuple, without undefined ones.
using Tensors = std::vector<torch::Tensor>;

/// A layer that exists.
struct BuiltLayer {
  /// Holds its parameters; null when there are none.
  std::shared_ptr<torch::nn::Module> module;
  std::function<Tensors(const Tensors&)> forward;
};

/// A layer as the list knows it.
struct LayerDefinition {
  /// Unique in its list, without an empty part between dots. Parameters of the
  /// layer are called by it: "layer1.0" + "." + "conv1.weight".
  std::string name;
  /// Called by each rank that the layer lives on, and under a meta device by
  /// whoever counts or compares layers; each call builds a new one.
  std::function<BuiltLayer()> build;
};

/// Two parameters of different layers that are one.
struct Tie {
  std::string first;   // the one that owns the name in checkpoints
  std::string second;  // of a later layer
  bool operator==(const Tie&) const = default;
};

namespace detail {

template <class Result>
Tensors to_tensors(Result&& result) {
  using Plain = std::decay_t<Result>;
  if constexpr (std::is_convertible_v<Plain, torch::Tensor>) {
    return {std::forward<Result>(result)};
  } else if constexpr (std::is_same_v<Plain, Tensors>) {
    return std::forward<Result>(result);
  } else {
    return std::apply(
        [](auto&&... each) { return Tensors{std::move(each)...}; },
        std::forward<Result>(result));
  }
}

[[noreturn]] void wrong_number_of_tensors(
    const std::string& layer, size_t taken, size_t given);

template <class Arg>
inline constexpr bool is_tuple_argument =
    std::is_same_v<std::decay_t<Arg>, Tensors>;

/// Calls `function`, whose parameters are Args, with the tensors one by one (or
/// with all of them when it takes Tensors).
template <class... Args, class Function, size_t... I>
Tensors call_with(
    const std::string& layer,
    const Function& function,
    const Tensors& inputs,
    std::index_sequence<I...>) {
  if constexpr ((sizeof...(Args) == 1) && (is_tuple_argument<Args> && ...)) {
    return to_tensors(function(inputs));
  } else {
    if (inputs.size() != sizeof...(Args)) {
      wrong_number_of_tensors(layer, sizeof...(Args), inputs.size());
    }
    return to_tensors(function(inputs[I]...));
  }
}

template <class Signature>
struct Caller;
template <class R, class C, class... Args>
struct Caller<R (C::*)(Args...)> {
  template <class Function>
  static Tensors call(
      const std::string& layer, const Function& f, const Tensors& inputs) {
    return call_with<Args...>(
        layer, f, inputs, std::index_sequence_for<Args...>());
  }
};
template <class R, class C, class... Args>
struct Caller<R (C::*)(Args...) const> : Caller<R (C::*)(Args...)> {};

// Modules whose forward is a template, or overloaded, take one tensor.
template <class M>
struct ForwardOf {
  using type = torch::Tensor (M::*)(const torch::Tensor&);
};
template <class M>
  requires requires { &M::forward; }
struct ForwardOf<M> {
  using type = decltype(&M::forward);
};

template <class M>
std::shared_ptr<M> module_of(std::shared_ptr<M> module) {
  return module;
}
template <class Holder>
  requires requires(const Holder& holder) { holder.ptr(); }
auto module_of(const Holder& holder) {
  return holder.ptr();
}

}  // namespace detail

/// A value; copies share the functions. Errors are ConfigErrors that name the
/// layer.
class LayerList {
 public:
  /// `build` returns a torch::nn module (a holder or a shared_ptr). Its forward
  /// takes tensors, or Tensors, and returns a tensor, a std::tuple of them or
  /// Tensors. Throws for a name that is taken or malformed.
  template <class Build>
    requires std::is_invocable_v<Build>
  LayerList& add(const std::string& name, Build build) {
    return add_definition(
        {name, [name, build = std::move(build)]() -> BuiltLayer {
           auto module = detail::module_of(build());
           using M = typename decltype(module)::element_type;
           auto call = [module](const auto&... tensors) {
             return module->forward(tensors...);
           };
           return {
               module, [name, call](const Tensors& inputs) {
                 using Signature = typename detail::ForwardOf<M>::type;
                 return detail::Caller<Signature>::call(name, call, inputs);
               }};
         }});
  }

  /// A layer without parameters: `function` is a lambda like a module's forward.
  template <class Function>
    requires requires { &Function::operator(); }
  LayerList& add_function(const std::string& name, Function function) {
    return add_definition({name, [name, function]() -> BuiltLayer {
                             return {nullptr, [name, function](
                                                  const Tensors& inputs) {
                                       using Signature =
                                           decltype(&Function::operator());
                                       return detail::Caller<Signature>::call(
                                           name, function, inputs);
                                     }};
                           }});
  }

  /// The general form.
  LayerList& add_definition(LayerDefinition layer);

  /// The two parameters ("layer.parameter") are one: they start equal, and their
  /// gradients are summed, wherever the layers live. Throws when a name's layer
  /// is not in the list yet; shapes are compared when the layers are built.
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

}  // namespace echelon
