// What devices and software reach of the published peaks: one set of constants for
// each device and each software stack, none for a model or a row of a table. All of
// them are in calibration.cpp, each with where it comes from.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "echelon/cluster/device.h"

namespace echelon {

/// What a device reaches, whoever asks.
struct DeviceRates {
  double matrix_share = 0;      // of the peak, for large even products
  double attention_share = 0;   // of the peak, fused attention
  double memory_share = 0;      // of the memory's rate, for streams
  double launch_seconds = 0;    // of one operator
  // The owner of this room adds what its formulas need.
};

/// How a training software works: what it fuses, hides and keeps.
struct Stack {
  std::string name;   // "megatron-2021", "megatron-core", "fsdp", "echelon"
  bool fused_attention = true;
  bool overlaps_gradients = true;   // with backward
  bool overlaps_parameters = true;  // gathers with forward
  double hidden_tensor_parallel = 0;  // part of tp's collectives that is hidden
  // The owner of this room adds what its formulas need.
};

DeviceRates rates_of(const Device& device);

const std::vector<std::string>& stack_names();
/// Throws ConfigError for an unknown name, with the nearest.
const Stack& find_stack(std::string_view name);

}  // namespace echelon
