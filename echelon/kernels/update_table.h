// What update.cpp hands to the kernels of update.cu, in their layout. Tests
// hand the same to the kernels' build for the host.
#pragma once

#include <torch/types.h>

#include <array>
#include <cstdint>
#include <functional>

#include "echelon/kernels/update.h"

namespace echelon::kernels {

/// A tensor with its gradient and its state, as update.cu has it.
struct Updated {
  void* parameter = nullptr;
  const void* gradient = nullptr;
  void* first = nullptr;
  void* second = nullptr;
  const void* step = nullptr;
  int64_t count = 0;
};

struct UpdatedTensors {
  std::array<Updated, kUpdateTensors> all;
  std::array<int, kUpdateTensors> first_block{};
  int count = 0;
};

struct SgdNumbers {
  float rate, momentum, decay;
  int nesterov;
};
SgdNumbers sgd_numbers(double rate, const SgdSettings& settings);

struct AdamNumbers {
  float rate, first_share, beta2, second_share, log_beta1, log_beta2, epsilon,
      decay;
  int decoupled;
};
AdamNumbers adam_numbers(double rate, const AdamSettings& settings);

/// Lists of equal length, or empty where a rule has no such state.
struct UpdateLists {
  at::TensorList parameters, gradients, first, second, steps;
};

/// Calls `launch` with each table of up to kUpdateTensors tensors, and the
/// blocks that they need. Empty tensors are left out.
void for_each_table(
    const UpdateLists& lists,
    const std::function<void(UpdatedTensors& table, int64_t blocks)>& launch);

}  // namespace echelon::kernels
