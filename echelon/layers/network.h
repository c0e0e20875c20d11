// A list of layers, or a slice of it, that exists: a module like any other.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "echelon/layers/batch_norm.h"
#include "echelon/layers/layer_list.h"
#include "echelon/layers/ties.h"

namespace echelon {

/// One step of a network. Its parameters are those of the network whose names
/// begin with `name` and a dot.
struct Layer {
  std::string name;  // "conv1", "layer2.0"; unique in its list
  std::shared_ptr<torch::nn::Module> module;  // null: no parameters
  LayerForward forward;
};

/// A layer of a network that was built just now, its ties to earlier layers of
/// the slice made: for who moves or cuts it before the next one is built.
struct NewLayer {
  size_t index;  // in the list
  Layer& layer;  // its forward may be replaced, by one around it, say
  /// Its parameters by full name, but those that earlier layers have: each of
  /// the network's comes once.
  std::vector<std::pair<std::string, torch::Tensor>> parameters;
  /// Parameters of earlier layers that it uses as well, each once.
  std::vector<torch::Tensor> shared;
};
using OnNewLayer = std::function<void(NewLayer& layer)>;

/// Where a computation first left the finite numbers.
struct NonFinite {
  std::string layer;  // a layer's name; "input" when the input already had it
  std::string what;   // "input", "output", or "parameter conv1.weight"
};

/// Runs the layers [begin, end) of a list in order. parameters(), train(),
/// to(), clone() do what they do on every torch::nn::Module; names are those of
/// the whole list ("layer1.0.conv1.weight").
///
/// Tied parameters of the slice are one tensor, which is listed once: under the
/// first of its names that the slice has.
class Network : public torch::nn::Module {
 public:
  /// See build_network.
  Network(
      const LayerList& list, size_t begin, size_t end,
      std::optional<uint64_t> seed, const OnNewLayer& on_new_layer = nullptr);

  const std::vector<Layer>& layers() const { return layers_; }

  /// The whole list, and which of its layers these are.
  const LayerList& list() const { return list_; }
  size_t begin() const { return begin_; }
  size_t end() const { return begin_ + layers_.size(); }

  /// What the last layer returns. A layer that cannot take what the one before
  /// it returned is a ConfigError that names both, with shapes.
  Tensors forward(const Tensors& inputs);
  /// The same of one tensor. Throws ConfigError when the last layer returns
  /// more.
  torch::Tensor forward(torch::Tensor x);

  /// Each layer computes by what `wrap` makes of its forward from now on. A
  /// clone of the network has the forwards that it is built with.
  void
  wrap_forwards(const std::function<LayerForward(const Layer& layer)>& wrap);

  /// `gather` says what to hold while the parameters of one of layers() are
  /// looked at, where they are there while the layer computes and not between:
  /// what it returns keeps them together. Empty: they are always there.
  void set_gather(std::function<std::shared_ptr<void>(size_t layer)> gather);

  /// Every BatchNorm2d (batch_norm.h) of these layers, at whatever depth,
  /// computes by `function` from now on; empty: by itself.
  void set_batch_norm(BatchNormFunction function);

  /// The first place in the order of computation that has a NaN or an infinity:
  /// the input, then of each layer a parameter or an output. Empty when all are
  /// finite. Runs all layers once more, without gradients; buffers keep values.
  /// Batch statistics are this rank's alone, so one rank alone may call it; all
  /// ranks that compute a layer together, or that have its parameters together
  /// (set_gather), call, each looks at its own parts.
  std::optional<NonFinite> first_nonfinite_layer(const Tensors& inputs);
  std::optional<NonFinite> first_nonfinite_layer(const torch::Tensor& x);

  /// A copy with its own parameters, on `device` if given; requires_grad,
  /// training modes and the batch-normalisation function go along. Throws Error
  /// when a layer's build returns the same module each time.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;

 private:
  struct Builder;

  void share(
      const torch::Tensor& parameter, const torch::Tensor& use,
      const std::string& name);
  const std::string& giver_of(size_t layer) const;
  Tensors run(Tensors values);

  LayerList list_;
  size_t begin_;
  std::vector<Layer> layers_;
  BatchNormFunction batch_norm_;
  std::function<std::shared_ptr<void>(size_t)> gather_;
};

/// Builds the layers [begin, end) of `list`, and no others.
///
/// With a seed, first values depend on it and on names alone, never on the cut
/// or on what other threads do: a layer's `initialize` writes them, or else its
/// `build` draws them from a generator of its own (seeded_build.h). A parameter
/// that is tied to one of an earlier slice gets that one's value; for it the
/// earlier layer is built, read and dropped.
/// Without, they are whatever the layers' `build` leaves: for weights to come.
///
/// Throws ConfigError for an empty or wrong range, for tied parameters that do
/// not exist or differ in shape, and for what LibTorch says while a layer is
/// built, with its name.
///
/// `on_new_layer`: called with each layer before the next one is built.
std::shared_ptr<Network> build_network(
    const LayerList& list, size_t begin, size_t end,
    const OnNewLayer& on_new_layer = nullptr);
std::shared_ptr<Network> build_network(
    const LayerList& list, size_t begin, size_t end, uint64_t seed,
    const OnNewLayer& on_new_layer = nullptr);

}  // namespace echelon
