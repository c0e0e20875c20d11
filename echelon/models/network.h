// A model as an ordered list of named layers.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "echelon/models/options.h"

namespace echelon {

/// One step of a model. Its parameters are those of the network whose names
/// begin with `name` and a dot.
struct Layer {
  std::string name;  // "conv1", "layer2.0"; unique in its network
  std::function<torch::Tensor(const torch::Tensor&)> forward;
};

/// How a batch-normalisation layer computes its output; what a network calls
/// instead of module.forward(x), so that statistics can be taken over ranks.
using BatchNormFunction = std::function<torch::Tensor(
    torch::nn::BatchNorm2dImpl& module, const torch::Tensor& x)>;

/// Where a computation first left the finite numbers.
struct NonFinite {
  std::string layer;  // a layer's name; "input" when the input already had it
  std::string what;   // "input", "output", or "parameter conv1.weight"
};

/// Runs its layers in order. A module like any other: parameters(), train(),
/// to(), clone() do what they do on every torch::nn::Module.
class Network : public torch::nn::Module {
 public:
  /// Copies share nothing; `clone_function` builds an empty network of the same
  /// layers, for clone(). Without it, clone() throws.
  explicit Network(
      std::function<std::shared_ptr<Network>()> clone_function = nullptr);

  /// Adds a step behind the others. Modules that it uses are registered by the
  /// caller (register_module), under names that begin with `name`. Throws Error
  /// for a name that is taken.
  void append(
      std::string name,
      std::function<torch::Tensor(const torch::Tensor&)> forward);

  const std::vector<Layer>& layers() const { return layers_; }

  /// layers().back().forward(… layers().front().forward(x)).
  torch::Tensor forward(torch::Tensor x);

  /// Batch statistics by `function` from now on; empty: module.forward(x). The
  /// layers' functions must call batch_norm() below for it to have an effect.
  void set_batch_norm(BatchNormFunction function);
  torch::Tensor
  batch_norm(torch::nn::BatchNorm2dImpl& module, const torch::Tensor& x) const;

  /// The first place in the order of computation that has a NaN or an infinity:
  /// the input, then of each layer a parameter or the output. Empty when all
  /// are finite. Runs the layers once more in the current mode, without
  /// gradients; buffers keep their values. Calls no collective, so one rank
  /// alone may call it.
  std::optional<NonFinite> first_nonfinite_layer(const torch::Tensor& x);

  /// A copy with its own parameters, on `device` if given; requires_grad,
  /// training mode and the batch-normalisation function go along.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;

 private:
  std::function<std::shared_ptr<Network>()> clone_function_;
  std::vector<Layer> layers_;
  BatchNormFunction batch_norm_;
};

/// Builds a model on the CPU and gives it first values (initialize.h).
///
///   input_shape  one sample, without the batch: channels, height, width; for
///                "mlp" any shape
///   classes      outputs of the last layer
///   forward      [batch, *input_shape] -> [batch, classes], unnormalised
///                scores (logits), in options.dtype
///
/// simple_cnn  two 3x3 convolutions of 16 and 32 channels, each with ReLU and
///             2x2 max-pooling, then one linear layer: conv1 conv2 fc
/// mlp         linear layers with ReLU between them: fc1 fc2 …
/// resnetN     torchvision's architecture and names: He et al., 2015,
///             arXiv:1512.03385, with the stride of a bottleneck in its 3x3
///             convolution
///
/// Throws ConfigError as list_parameters does. Weights from a file are loaded
/// afterwards: weights.h.
std::shared_ptr<Network> make_network(
    const ModelOptions& options,
    const std::vector<int64_t>& input_shape,
    int64_t classes,
    uint64_t seed);

}  // namespace echelon
