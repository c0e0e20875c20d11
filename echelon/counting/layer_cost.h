// The computation and memory of each layer of a list, counted without memory.
//
//   auto costs = count_layers(layers, {{{64, 3, 224, 224}}});
//   balance(flops_of(costs), 4);                    // layout/partition.h
//
// Each layer is built on the meta device (meta_mode.h), run forwards and
// backwards there, and dropped, so a model that no device holds is counted in
// milliseconds and without memory.
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "echelon/counting/operator_work.h"
#include "echelon/layers/layer_list.h"

namespace echelon::counting {

/// Shape and dtype of a tensor of a batch.
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
  double forward_flops = 0.0;   // as operator_flops (operator_work.h) counts
  double backward_flops = 0.0;  // gradients of parameters, and of inputs that
                                // need one
  int64_t parameters = 0;       // elements
  int64_t parameter_bytes = 0;
  int64_t buffer_bytes = 0;
  /// The memory that stays alive from forward to backward, without parameters.
  /// Each storage counts once in the whole list, for the first layer that keeps
  /// it.
  int64_t activation_bytes = 0;
  /// Memory that this layer also keeps but an earlier layer counts, mostly its
  /// input. A slice that begins here keeps a copy of its own.
  int64_t repeated_bytes = 0;
  int64_t output_bytes = 0;  // passed to the next layer
  std::vector<TensorSpec> outputs;

  std::vector<ParameterSpec> parameter_specs;  // each storage once
  /// The storages of this layer's inputs, without those that an earlier layer
  /// was given: what full recompute keeps for the layer.
  int64_t input_bytes = 0;
  /// The inputs among activation_bytes + repeated_bytes.
  int64_t kept_input_bytes = 0;
  /// Results of CountOptions::keep, each storage once: what selective recompute
  /// keeps in addition to the inputs.
  int64_t kept_result_bytes = 0;
  /// The peak of forward above the memory at its start: results, kept tensors
  /// and temporaries.
  int64_t forward_peak_bytes = 0;
  /// The peak of backward above the memory at its start. The gradients of the
  /// outputs, which exist when it starts, are added, and kept tensors that it
  /// has freed are subtracted. In backward_peak_bytes gradients of parameters
  /// stay, as autograd leaves them; in backward_working_bytes they do not
  /// count.
  int64_t backward_peak_bytes = 0;
  int64_t backward_working_bytes = 0;
  /// The gradients of parameters in backward_peak_bytes.
  int64_t backward_peak_gradient_bytes = 0;

  double flops() const { return forward_flops + backward_flops; }
};

struct CountOptions {
  /// Operators, as "aten::mm", whose results selective recompute keeps.
  std::vector<std::string> keep;
  /// Floating-point parameters and inputs have this dtype, whatever the layers
  /// say, and buffers its sum_dtype; none: as they are built.
  std::optional<torch::Dtype> dtype;
  /// For layers that compute differently on CPUs and GPUs: the device to count.
  torch::DeviceType device = torch::kCPU;
  /// Parameters lie one after the other, as in the flat buffers of
  /// parallel/shard, so that layers find the matrices that they can join.
  bool flat = false;
  /// The matrices that have rows of zeros behind them there, by full name.
  std::set<std::string> padded = {};
  /// Called when a layer has run forwards, and when it has run backwards.
  std::function<void(const std::string& layer, bool backward)> ran = nullptr;
  /// Of count_operators: called before the operators of a pass and after each,
  /// with how many are counted.
  std::function<void(size_t operators)> counted = nullptr;
};

/// The cost of each layer for a batch of `inputs`, which the first layer takes.
/// Layers are counted as they are built, in training mode. Attention counts as
/// the fused kernels compute it.
///
/// Thread-safe, without effect on other threads. No random numbers are drawn,
/// and existing tensors that layers share do not change.
///
/// Throws ConfigError that names the layer, its inputs and the operator when a
/// layer does not take what the one before it returns, and when it needs values
/// and not only shapes.
std::vector<LayerCost> count_layers(
    const LayerList& layers, const std::vector<TensorSpec>& inputs,
    const CountOptions& options = {});

/// The operators of one layer, in the order in which they ran.
struct LayerOperators {
  std::vector<OperatorWork> forward;
  std::vector<OperatorWork> backward;
};

struct CountedOperators {
  std::vector<LayerCost> costs;  // as of count_layers
  std::vector<LayerOperators> layers;
};

/// Throws as count_layers does.
CountedOperators count_operators(
    const LayerList& layers, const std::vector<TensorSpec>& inputs,
    const CountOptions& options = {});

/// The floating-point operations of each layer in both directions, by which
/// balance() can partition the list.
std::vector<double> flops_of(const std::vector<LayerCost>& costs);

/// The bytes that the layers begin to end - 1 keep from forward to backward
/// when they form a slice.
int64_t
activation_bytes(const std::vector<LayerCost>& costs, size_t begin, size_t end);

}  // namespace echelon::counting
