// Model parallelism in one process: slices of a list of layers on different
// devices. Activations are copied from slice to slice.
//
//   const auto placement = plan_placement(layers, options);
//   PlacedNetwork network(layers, placement, seed);
//   auto loss = cross_entropy(network.forward(images), targets);
//   loss.backward();
//   optimizer.step();                // over network.parameters(), as always
//
// Outputs, and so the targets, are on the last device. Devices work one after
// the other, since each slice waits for the one before it: use this for models
// that fit on no single device, and a pipeline to make them fast.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "echelon/layers/layer_list.h"
#include "echelon/layers/network.h"
#include "echelon/parallel/placement/placement.h"
#include "echelon/timeline/recorder.h"

namespace echelon::placement {

/// A module like any other: its parameters, each listed once and on its device,
/// have the names that they have on one device. Gradients, optimizers, train()
/// and state dicts work as they do there.
///
/// A tied parameter is on the device of the first slice that has it. A slice on
/// another device gets a copy in each forward, and its gradients flow back.
class PlacedNetwork : public torch::nn::Module {
 public:
  /// Builds each slice and moves it to its device before it builds the next
  /// one. Parameters are initialised as by build_network (layers/network.h),
  /// with a seed equally for any placement. Throws ConfigError as build_network
  /// does, and when `placement` was not made for `layers`.
  PlacedNetwork(
      const LayerList& layers, Placement placement,
      std::optional<uint64_t> seed = std::nullopt);
  ~PlacedNetwork() override;

  /// Inputs may be on any device; outputs are on the last one. Differentiable.
  /// The second form throws ConfigError when the last layer returns several
  /// tensors.
  Tensors forward(const Tensors& inputs);
  torch::Tensor forward(const torch::Tensor& x);

  /// While a step is recorded, adds a span "forward" and a span "backward" for
  /// each slice and pass, on the tracks "device 0", "device 1" … in the order
  /// of the placement. These steps wait for each device at the boundaries of
  /// its slice, so that the spans show when it computed. Null: no spans.
  void set_recorder(timeline::Recorder* recorder);

  /// Returns the first layer with a NaN or an infinity, as Network's does.
  std::optional<NonFinite> first_nonfinite_layer(const Tensors& inputs);

  const Placement& placement() const { return placement_; }

  /// Throws Error: the placement decides where layers are. Dtypes may change.
  using torch::nn::Module::to;
  void to(torch::Device device, bool non_blocking = false) override;
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false)
      override;

 private:
  struct Slice;

  void build(const LayerList& layers, std::optional<uint64_t> seed);
  void register_layers(const Network& network);
  void share_ties(const LayerList& layers);
  Tensors run(size_t slice, const Tensors& inputs);

  Placement placement_;
  timeline::Recorder* recorder_ = nullptr;
  std::vector<std::unique_ptr<Slice>> slices_;
};

}  // namespace echelon::placement
