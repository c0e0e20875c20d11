// A list of layers, or a slice of it, built as one torch::nn::Module.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "echelon/layers/layer_list.h"
#include "echelon/layers/ties.h"

namespace echelon {

/// A layer of a network. Its parameters are those of the network whose names
/// begin with `name` and a dot.
struct Layer {
  std::string name;  // "conv1", "layer2.0"; unique in its list
  std::shared_ptr<torch::nn::Module> module;  // null: no parameters
  LayerForward forward;
};

/// A layer of a network that was just built and tied to earlier layers of the
/// slice. The callback may move or shard it before the next one is built.
struct NewLayer {
  size_t index;  // in the list
  Layer& layer;  // the callback may replace its forward
  /// Its parameters by full name, without those that earlier layers have, so
  /// that each parameter of the network comes once.
  std::vector<std::pair<std::string, torch::Tensor>> parameters;
  /// Parameters of earlier layers that it also uses, each once.
  std::vector<torch::Tensor> shared;
};
using OnNewLayer = std::function<void(NewLayer& layer)>;

/// The first place of a computation with a NaN or an infinity.
struct NonFinite {
  std::string layer;  // a layer's name, or "input" for the model's input
  std::string what;   // "input", "output", or "parameter conv1.weight"
};

/// Runs the layers [begin, end) of a list in order. parameters(), train(), to()
/// and clone() work as on every torch::nn::Module; names are those of the whole
/// list ("layer1.0.conv1.weight").
///
/// Tied parameters of the slice are one tensor, which is listed once, under the
/// first of its names that the slice has.
class Network : public torch::nn::Module {
 public:
  /// See build_network.
  Network(
      const LayerList& list, size_t begin, size_t end,
      std::optional<uint64_t> seed, const OnNewLayer& on_new_layer = nullptr);

  const std::vector<Layer>& layers() const { return layers_; }

  /// The whole list, and the range of this network's layers in it.
  const LayerList& list() const { return list_; }
  size_t begin() const { return begin_; }
  size_t end() const { return begin_ + layers_.size(); }

  /// Returns the last layer's output. When a layer cannot take the output of
  /// the one before it, throws a ConfigError that names both, with shapes.
  Tensors forward(const Tensors& inputs);
  /// The same for one tensor. Throws ConfigError when the last layer returns
  /// several.
  torch::Tensor forward(torch::Tensor x);

  /// For parameters that are unsharded only while their layer computes:
  /// unshard(i) unshards those of layers()[i] so that they can be inspected,
  /// and they stay so while its result lives. Empty: they are never sharded.
  void set_unshard(std::function<std::shared_ptr<void>(size_t layer)> unshard);

  /// The first place in the order of computation that has a NaN or an infinity:
  /// the input, then a parameter or an output of each layer. Empty when all are
  /// finite. Runs all layers once more, without gradients; buffers keep their
  /// values. Batch statistics are those of this rank, so a single rank may call
  /// it. But all ranks that compute a layer together, or that share its
  /// parameters (set_unshard), must call it; each checks its own shards.
  std::optional<NonFinite> first_nonfinite_layer(const Tensors& inputs);
  std::optional<NonFinite> first_nonfinite_layer(const torch::Tensor& x);

  /// A copy with its own parameters, on `device` if given. It has the same
  /// requires_grad and training modes, and the forwards that its layers are
  /// built with. Throws Error when a layer's build returns the same module each
  /// time.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;

 private:
  struct Builder;

  void share(
      const torch::Tensor& parameter, const torch::Tensor& use,
      const std::string& name);
  const std::string& producer_of(size_t layer) const;
  Tensors run(Tensors values);

  LayerList list_;
  size_t begin_;
  std::vector<Layer> layers_;
  std::function<std::shared_ptr<void>(size_t)> unshard_;
};

/// Builds the layers [begin, end) of `list`, and no others.
///
/// With a seed, initial values depend only on it and on names, never on the
/// partition or on other threads: a layer's `initialize` writes them, or else
/// its `build` draws them from a generator of its own. A
/// parameter that is tied to one of an earlier slice gets that one's value; to
/// read it the earlier layer is built and dropped. Without a seed, values are
/// those that the layers' `build` leaves, to be replaced by loaded weights.
///
/// Throws ConfigError for an empty or wrong range, for tied parameters that do
/// not exist or differ in shape, and, with the layer's name, for errors of
/// LibTorch while a layer is built.
///
///   on_new_layer  called with each layer before the next one is built
std::shared_ptr<Network> build_network(
    const LayerList& list, size_t begin, size_t end,
    std::optional<uint64_t> seed = std::nullopt,
    const OnNewLayer& on_new_layer = nullptr);

/// Its destructor gives the buffers of a module their values again. While it
/// lives, this thread records no gradients.
class SavedBuffers {
 public:
  explicit SavedBuffers(const torch::nn::Module& module);
  ~SavedBuffers();
  SavedBuffers(const SavedBuffers&) = delete;
  SavedBuffers& operator=(const SavedBuffers&) = delete;

 private:
  torch::NoGradGuard no_grad_;
  std::vector<torch::Tensor> buffers_;
  std::vector<torch::Tensor> values_;
};

/// The tensor of a forward's `outputs`. Throws ConfigError that names `layer`,
/// which returned them, unless it is a single one.
torch::Tensor only_output(Tensors outputs, const std::string& layer);

}  // namespace echelon
