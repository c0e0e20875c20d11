// Measures what all ranks of a machine do at the same time.
#pragma once

#include <ATen/DeviceAccelerator.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "echelon/comm/world.h"

namespace echelon::bench {

/// The median; the lower one of the two in the middle. `values` is not empty.
double median(std::vector<double> values);

/// Collective: every rank of the world constructs one and calls the same
/// methods in the same order. Ranks begin each round together, so that they
/// share cores, memory and links as they do in training. Figures are medians
/// over rounds, averaged over the ranks.
class BenchMeter {
 public:
  explicit BenchMeter(World& world);

  /// Seconds of one call, of many in a row.
  double seconds_of(const std::function<void()>& call);

  /// Each call returns the seconds it took; the result has the median of
  /// `again` consecutive calls, by round and then by call. Use it for
  /// differences between calls: they take turns in each round, so a machine
  /// that slows down for a while does so for all of them.
  std::vector<std::vector<double>> rounds_of_own_seconds(
      const std::vector<std::function<double()>>& calls, int64_t again,
      int64_t rounds);

  /// Seconds of each call. On a processor the calls take turns, as the
  /// operators of a network do: between two calls of one kind the caches have
  /// seen all others, and a machine that slows down for a while does so for
  /// all. A call that takes next to no time is repeated within its turn, which
  /// is how launch overhead is measured. A GPU is kept busy with each call for
  /// some time.
  std::vector<double>
  seconds_of(const std::vector<std::function<void()>>& calls);

  torch::Device device() const { return world_.device(); }
  bool on_gpu() const {
    return at::accelerator::isAccelerator(device().type());
  }

 private:
  double quickest_seconds_of(const std::function<void()>& call);
  void finish() const;
  double round(const std::function<void()>& call, int64_t calls);
  int64_t calls_in(double seconds, double once) const;
  double average(double value) const;
  int64_t agreed(int64_t calls) const;

  World& world_;
  Group all_;
};

}  // namespace echelon::bench
