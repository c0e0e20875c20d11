// Model parallel in one process: slices of a list of layers on different
// devices, activations copied where they meet.
//
//   const auto placement = plan_placement(layers, options);
//   PlacedNetwork network(layers, placement, seed);
//   auto loss = cross_entropy(network.forward(images), targets);  // last
//   device loss.backward();
//
// Devices work one after the other, since each slice waits for the one before
// it: this fits models that no one device holds, and pipelines make them fast.
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

/// A module like any other: parameters, each once and on its device, have the
/// names that they have on one device, and gradients, optimizers, train() and
/// state dicts work as there.
///
/// Tied parameters live with the first slice that has one; a slice on another
/// device gets a copy in each forward pass, and its gradients flow back.
class PlacedNetwork : public torch::nn::Module {
 public:
  /// Builds each slice and takes it to its device before the next one is built.
  /// First values are those of build_network (models/network.h): with a seed
  /// the same on any placement. Throws ConfigError as it does, and when
  /// `placement` is not one of `layers`.
  PlacedNetwork(
      const LayerList& layers, Placement placement,
      std::optional<uint64_t> seed = std::nullopt);
  ~PlacedNetwork() override;

  /// Takes inputs on any device; outputs are on the last one. Differentiable.
  Tensors forward(const Tensors& inputs);
  torch::Tensor forward(const torch::Tensor& x);

  /// While a step is recorded, one span "forward" and one "backward" for each
  /// slice and pass, on the tracks "device 0", "device 1" … in the order of the
  /// placement. Devices that queue their work are waited for at the borders of
  /// these steps, so that the spans are what they did. Null: none.
  void set_recorder(Recorder* recorder);

  /// As Network's: the first place that has a NaN or an infinity.
  std::optional<NonFinite> first_nonfinite_layer(const Tensors& inputs);

  const Placement& placement() const { return placement_; }

  /// Throws Error: the placement says where the layers are. Dtypes may change.
  void to(torch::Device device, bool non_blocking = false) override;
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false)
      override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;

 private:
  struct Slice;

  void build(const LayerList& layers, std::optional<uint64_t> seed);
  void register_layers(const Network& network);
  void share_ties(const LayerList& layers);
  Tensors run(size_t slice, const Tensors& inputs);

  Placement placement_;
  Recorder* recorder_ = nullptr;
  std::vector<std::unique_ptr<Slice>> slices_;
};

}  // namespace echelon::placement
