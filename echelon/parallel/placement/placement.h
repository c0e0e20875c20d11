// Decides which device holds which layers, and how much memory that takes,
// before anything is built. Refuses what does not fit.
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

/// What is balanced over the devices.
enum class Balance {
  time,    // floating-point operations, as far as the memory allows
  memory,  // the share of its memory that each device uses
};

struct PlacementOptions {
  /// In the order of the layers. A device may be listed several times.
  std::vector<torch::Device> devices;
  /// Shapes and dtypes of a batch, as the first layer takes it.
  std::vector<counting::TensorSpec> inputs;
  Balance balance = Balance::time;
  /// The first layer of each device's slice, without the first device, as
  /// partition_at (layout/partition.h) takes them; empty: chosen by `balance`.
  std::vector<std::string> partition_at;
  /// Memory limit in bytes of each entry of `devices`, kNoLimit for none.
  /// Empty: a GPU's memory, divided by its number of slices; no limit on CPUs.
  std::vector<int64_t> limits;
  /// Bytes of optimizer state per element of a parameter: 8 for AdamW, which
  /// keeps two numbers of 4 bytes; 0 for plain SGD.
  int64_t optimizer_bytes = 8;
};

/// One slice. Bytes count what stays from step to step, and from forward to
/// backward; temporary memory of operators comes on top.
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
  /// Copies of tied parameters that an earlier slice on another device owns.
  int64_t copy_bytes = 0;
  int64_t activation_bytes = 0;  // for the batch
  int64_t output_bytes = 0;      // sent to the next device, for the batch
  double flops = 0.0;            // of the batch, forward and backward
  int64_t limit = kNoLimit;

  int64_t total_bytes() const {
    return parameter_bytes + gradient_bytes + optimizer_bytes + buffer_bytes +
           copy_bytes + activation_bytes;
  }
};

struct Placement {
  std::vector<size_t> boundaries;  // as layout/partition.h has them
  std::vector<DeviceShare> devices;
};

/// Throws ConfigError for an empty list of devices, a device that does not
/// exist, more devices than layers, a wrong `partition_at` (as the function
/// does), layers that cannot be counted (as count_layers does), and, with what
/// each device would need, when the model does not fit.
Placement
plan_placement(const LayerList& layers, const PlacementOptions& options);

/// Bytes of memory of an accelerator; nullopt for a CPU. Throws ConfigError for
/// a device that does not exist.
std::optional<int64_t> device_memory(torch::Device device);

/// One line for each device, and one for the whole model.
std::vector<std::string> describe(const Placement& placement);

}  // namespace echelon::placement
