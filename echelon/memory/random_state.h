// States of random generators. For recompute's .cpp files alone.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace echelon::detail {

/// Torch's generators: the CPU's, and those of the GPUs that `tensors` are on.
std::vector<at::Generator>
generators_of(const std::vector<at::Tensor>& tensors);

class RandomState {
 public:
  RandomState() = default;  // of none
  explicit RandomState(const std::vector<at::Generator>& generators);

  void restore() const;
  bool empty() const { return states_.empty(); }
  /// Of the same generators.
  bool operator==(const RandomState& other) const;

 private:
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

}  // namespace echelon::detail
