// The name, shape and initial value of every parameter and buffer of a model,
// without building it. Free of LibTorch, so that the command line can check a
// weights file before any rank starts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/options/model.h"

namespace echelon {

/// The distribution that a tensor's initial value is drawn from.
struct InitialValue {
  enum class Kind {
    constant,  // every element is `value`
    uniform,   // between -value and value
    normal,    // mean 0, standard deviation `value`
  };
  Kind kind = Kind::constant;
  double value = 0.0;
  bool operator==(const InitialValue&) const = default;

  static InitialValue constant_of(double value) {
    return {Kind::constant, value};
  }
  static InitialValue uniform_within(double bound) {
    return {Kind::uniform, bound};
  }
  static InitialValue normal_of(double standard_deviation) {
    return {Kind::normal, standard_deviation};
  }
};

/// One named tensor of a model.
struct ParameterInfo {
  enum class Kind {
    parameter,  // trained
    buffer,     // running statistics and counters: saved, not trained
  };
  /// As torchvision or Hugging Face spells it, "layer1.0.bn1.weight".
  std::string name;
  std::vector<int64_t> shape;  // empty: one number
  Kind kind = Kind::parameter;
  std::string dtype;  // float32 | float64 | int64
  InitialValue initial;
  /// The earlier parameter of the list that this one is tied to; files need not
  /// have both. Empty: it is not tied.
  std::string tied_to;
  /// Whether this is the matrix of a linear layer that can have adapters
  /// (trained_parameters.h).
  bool takes_adapter = false;

  int64_t num_elements() const;
};

/// The number of trained elements: those of the parameters, tied ones once.
int64_t num_parameters(const std::vector<ParameterInfo>& list);

/// Every parameter and buffer of the model, in the order of a state dict: a
/// module's parameters, then its buffers, then its children.
///
///   options      name, hidden, dtype are read; `classes` here is not
///   input_shape  one sample, without the batch: channels, height, width;
///                for "mlp" any shape, which it flattens; for language models
///                only the length of the sequence
///   classes      outputs of the last layer, 1 or more; the vocabulary of a
///                language model (language_model.h)
///
/// Throws ConfigError, with the numbers, for an unknown model, a shape
/// that is not an image, an image too small for the model's poolings, and a
/// tensor whose number of elements overflows, and throws as
/// language_model_shape.
std::vector<ParameterInfo> list_parameters(
    const ModelOptions& options, const std::vector<int64_t>& input_shape,
    int64_t classes);

/// The names of the model's layers, in order. It can be partitioned between any
/// two of them. Throws ConfigError for an unknown model.
std::vector<std::string> list_layers(const ModelOptions& options);

/// Depth of each of the four groups of residual blocks, and their type.
/// Source: He et al., "Deep Residual Learning for Image Recognition", 2015,
/// arXiv:1512.03385, table 1.
struct ResnetConfig {
  bool bottleneck = false;  // 1x1, 3x3, 1x1 instead of two 3x3 convolutions
  std::vector<int64_t> blocks;
};

/// The configuration of "resnet18" .. "resnet152". Throws ConfigError for
/// another name.
ResnetConfig resnet_config(const std::string& name);

}  // namespace echelon
