// Which device holds which layers, and the memory that this takes: decided, and
// refused when it does not fit, before anything is built.
//
//   const auto placement = plan_placement(layers, {
//       .devices = {torch::Device("cuda:0"), torch::Device("cuda:1")},
//       .inputs = {{{64, 3, 224, 224}}}});
//   for (const auto& line : describe(placement)) std::cout << line << "\n";
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "echelon/counting/layer_cost.h"
#include "echelon/layers/layer_list.h"
#include "echelon/layout/partition.h"

namespace echelon::placement {

/// What the devices share out evenly.
enum class Balance {
  time,    // floating-point operations, as far as the memory allows
  memory,  // the share of its memory that each device fills
};

struct PlacementOptions {
  /// In the order of the layers; one may be named several times.
  std::vector<torch::Device> devices;
  /// A batch, as the first layer takes it.
  std::vector<TensorSpec> inputs;
  Balance balance = Balance::time;
  /// The layers that begin the slice of each device but the first, as cut_at
  /// (layout/partition.h) takes them; empty: by balance.
  std::vector<std::string> cut;
  /// Bytes, one for each of `devices`, kNoLimit for none. Empty: a GPU's
  /// memory, shared by the slices that it is given; no limit on CPUs.
  std::vector<int64_t> limits;
  /// Of an optimizer, for each element of a parameter: AdamW keeps two numbers
  /// of 4 bytes, plain SGD nothing.
  int64_t optimizer_bytes = 8;
};

/// One slice. Bytes are what stays from step to step, and from forward to
/// backward; what an operator needs while it runs comes on top.
struct DeviceShare {
  torch::Device device = torch::kCPU;
  std::string first;  // layer
  std::string last;
  size_t num_layers = 0;
  int64_t parameters = 0;  // elements
  int64_t parameter_bytes = 0;
  int64_t gradient_bytes = 0;
  int64_t optimizer_bytes = 0;
  int64_t buffer_bytes = 0;
  /// Tied parameters that live with an earlier slice on another device.
  int64_t copy_bytes = 0;
  int64_t activation_bytes = 0;  // for the batch
  int64_t output_bytes = 0;      // sent to the next device, for the batch
  double flops = 0.0;            // of the batch, forwards and backwards
  int64_t limit = kNoLimit;

  int64_t total_bytes() const {
    return parameter_bytes + gradient_bytes + optimizer_bytes + buffer_bytes +
           copy_bytes + activation_bytes;
  }
};

struct Placement {
  std::vector<size_t> cut;  // boundaries: layout/partition.h
  std::vector<DeviceShare> devices;
};

/// Throws ConfigError: for no device or one that is not there, for more devices
/// than layers, for a cut as cut_at does, for layers that cannot be counted as
/// count_layers does, and with what each device would need when it does not
/// fit.
Placement
plan_placement(const LayerList& layers, const PlacementOptions& options);

/// The memory of an accelerator; nothing for a CPU. Throws ConfigError when it
/// is not there.
std::optional<int64_t> device_memory(torch::Device device);

/// A line for each device, and one for the whole.
std::vector<std::string> describe(const Placement& placement);

}  // namespace echelon::placement
