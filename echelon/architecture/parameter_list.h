// What a model consists of, without building it: the name, shape and first
// value of every parameter and buffer. Free of LibTorch, so that the command
// line can check a weights file before any rank starts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/architecture/initial_value.h"
#include "echelon/options/model.h"

namespace echelon {

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
  /// The parameter, earlier in the list, that this one is; files need not have
  /// both. Empty: it is one of its own.
  std::string tied_to;

  int64_t num_elements() const;
};

/// Trained numbers: those of the parameters, tied ones once.
int64_t num_parameters(const std::vector<ParameterInfo>& list);

/// Every parameter and buffer of the model, in the order of a state dict: a
/// module's parameters, then its buffers, then its children.
///
///   options      name, hidden, dtype are read; `classes` here is not
///   input_shape  one sample, without the batch: channels, height, width;
///                for "mlp" any shape, which it flattens; for language models
///                the sequence's length alone
///   classes      outputs of the last layer, 1 or more; the vocabulary of a
///                language model (language_model.h)
///
/// Throws ConfigError, with the numbers, for an unknown model or dtype, a shape
/// that is not an image, an image too small for the model's poolings, a tensor
/// whose number of elements overflows, or as language_model_shape.
std::vector<ParameterInfo> list_parameters(
    const ModelOptions& options, const std::vector<int64_t>& input_shape,
    int64_t classes);

/// The names of the model's layers, in order: what it can be cut between.
/// Throws ConfigError for an unknown model.
std::vector<std::string> list_layers(const ModelOptions& options);

/// Depth of each of the four groups of residual blocks, and their type.
/// Source: He et al., "Deep Residual Learning for Image Recognition", 2015,
/// arXiv:1512.03385, table 1.
struct ResnetPlan {
  bool bottleneck = false;  // 1x1, 3x3, 1x1 instead of two 3x3 convolutions
  std::vector<int64_t> blocks;
};

/// The plan of "resnet18" .. "resnet152". Throws ConfigError for another name.
ResnetPlan resnet_plan(const std::string& name);

}  // namespace echelon
