// What each layer of a list computes and keeps, counted without memory.
//
//   auto costs = count_layers(layers, {{{64, 3, 224, 224}}});
//   balance(flops_of(costs), 4);                    // layout/partition.h
//
// Each layer is built on the meta device (meta_mode.h), run forwards and
// backwards there, and forgotten, so a model that no device holds is counted in
// milliseconds and no memory.
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "echelon/layers/layer_list.h"

namespace echelon {

/// A tensor of a batch without its values.
struct TensorSpec {
  std::vector<int64_t> shape;
  torch::Dtype dtype = torch::kFloat32;

  int64_t bytes() const;
  bool operator==(const TensorSpec&) const = default;
};

/// "[8, 3, 32, 32] float32".
std::string to_string(const TensorSpec& spec);

/// A parameter of a layer.
struct ParameterSpec {
  std::string name;  // in the layer
  TensorSpec tensor;
  bool requires_grad = true;
};

struct LayerCost {
  std::string name;
  double forward_flops = 0.0;   // operator_flops.h says what counts
  double backward_flops = 0.0;  // gradients of parameters, and of those inputs
                                // that need one
  int64_t parameters = 0;       // elements
  int64_t parameter_bytes = 0;
  int64_t buffer_bytes = 0;
  /// What stays alive from forward to backward: each storage once in the whole
  /// list, with the layer that keeps it first. Parameters are not among them.
  int64_t activation_bytes = 0;
  /// What this layer keeps as well, but an earlier layer counts: its input,
  /// mostly. A slice that begins here keeps a copy of its own.
  int64_t repeated_bytes = 0;
  int64_t output_bytes = 0;  // what passes to the next layer
  std::vector<TensorSpec> outputs;

  std::vector<ParameterSpec> parameter_specs;  // each storage once
  /// The storages that this layer is given, those that an earlier layer was
  /// given left out: what recompute keeps of it.
  int64_t input_bytes = 0;
  /// Of activation_bytes + repeated_bytes, what are inputs.
  int64_t kept_input_bytes = 0;
  /// Results of CountOptions::keep, each storage once: what selective recompute
  /// keeps beside the inputs.
  int64_t kept_result_bytes = 0;
  /// The most at any moment of forward, beyond what was there when it began:
  /// results, what is kept, and what is gone when it ends.
  int64_t forward_peak_bytes = 0;
  /// The same of backward; the gradients of its outputs count, which are there
  /// when it begins, and what it frees of what was kept counts against it. In
  /// backward_peak_bytes gradients of parameters stay, as autograd leaves them;
  /// in backward_working_bytes they are gone as soon as they are there.
  int64_t backward_peak_bytes = 0;
  int64_t backward_working_bytes = 0;
  /// Of backward_peak_bytes, what are gradients of parameters.
  int64_t backward_peak_gradient_bytes = 0;

  double flops() const { return forward_flops + backward_flops; }
};

struct CountOptions {
  /// Operators, as "aten::mm", whose results selective recompute keeps.
  std::vector<std::string> keep;
  /// Parameters and inputs of floating point are of this dtype, whatever the
  /// layers say, and buffers of what its sums are taken in; none: as they are
  /// built.
  std::optional<torch::Dtype> dtype;
  /// Whose way of computing counts, of layers that have several.
  torch::DeviceType device = torch::kCPU;
  /// Told when a layer has run forwards, and when it has run backwards.
  std::function<void(const std::string& layer, bool backward)> ran = nullptr;
};

/// The cost of each layer for a batch of `inputs`, which the first layer takes.
/// Layers are counted as they are built, in training mode. Attention counts as
/// the fused kernels compute it.
///
/// Thread-safe; other threads are not disturbed, random numbers are not drawn,
/// and layers that share tensors that exist already leave them as they were.
///
/// Throws ConfigError that names the layer, what it was given, and the
/// operator: when a layer does not take what the one before it returns, and
/// when it needs values and not shapes alone.
std::vector<LayerCost> count_layers(
    const LayerList& layers, const std::vector<TensorSpec>& inputs,
    const CountOptions& options = {});

/// The floating-point operations of each layer, both directions: the costs that
/// balance by time takes.
std::vector<double> flops_of(const std::vector<LayerCost>& costs);

/// What the layers begin to end - 1 keep from forward to backward when they
/// live together and apart from the others.
int64_t
activation_bytes(const std::vector<LayerCost>& costs, size_t begin, size_t end);

}  // namespace echelon
