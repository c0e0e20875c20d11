// A watch for what all ranks of a machine do at once.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>

#include "echelon/comm/world.h"

namespace echelon {

/// Collective: every rank of the world makes one and asks it the same.
class BenchMeter {
 public:
  explicit BenchMeter(World& world);

  /// Seconds of one call: the median over rounds that all ranks begin together,
  /// averaged over the ranks, so that cores, memory and links are shared as they
  /// are in training.
  double seconds_of(const std::function<void()>& call);

  torch::Device device() const { return world_.device(); }
  bool on_gpu() const { return device().is_cuda(); }

 private:
  void finish() const;
  double round(const std::function<void()>& call, int64_t calls);
  double average(double value) const;
  int64_t agreed(int64_t calls) const;

  World& world_;
  Group all_;
};

}  // namespace echelon
