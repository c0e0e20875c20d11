// A watch for what all ranks of a machine do at once.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "echelon/bench/usual_pace.h"
#include "echelon/comm/world.h"

namespace echelon {

/// Collective: every rank of the world makes one and asks it the same, in the
/// same order. Ranks begin each round together, so that cores, memory and links
/// are shared as they are in training; figures are medians over rounds,
/// averaged over the ranks. A round after which a processor's cores are slower
/// than they were is measured again, once they are not: a hundred times, and
/// half a minute of waiting, in all.
class BenchMeter {
 public:
  explicit BenchMeter(World& world);
  /// `pace`: seconds of the same work at each call, of this rank; for tests.
  BenchMeter(World& world, std::function<double()> pace);

  /// Seconds of one call, of many that follow each other.
  double seconds_of(const std::function<void()>& call);

  /// Of what each call says that it took, the median of `again` that follow
  /// each other; by round, then by call. Differences between calls count: in
  /// each round all take turns, so that a machine that slows down for a while
  /// does so for all.
  std::vector<std::vector<double>> rounds_of_own_seconds(
      const std::vector<std::function<double()>>& calls, int64_t again,
      int64_t rounds);

  /// Seconds of each call. On a processor they take turns, as the operators of
  /// a network do: between two of one kind the caches have seen all others, and
  /// a machine that slows down for a while does so for all. What takes next to
  /// nothing is called again and again in its turn, as starting an operator is
  /// measured. A GPU is kept busy with each for some time.
  std::vector<double>
  seconds_of(const std::vector<std::function<void()>>& calls);

  /// Rounds that were measured again.
  int64_t repeated() const { return repeated_; }

  torch::Device device() const { return world_.device(); }
  bool on_gpu() const { return device().is_cuda(); }

 private:
  std::vector<double>
  undisturbed(const std::function<std::vector<double>()>& round);
  bool slow();
  double quickest_seconds_of(const std::function<void()>& call);
  void finish() const;
  double round(const std::function<void()>& call, int64_t calls);
  int64_t calls_in(double seconds, double once) const;
  double average(double value) const;
  double most(double value) const;
  int64_t agreed(int64_t calls) const;

  World& world_;
  Group all_;
  const std::function<double()> pace_;
  UsualPace usual_;
  int64_t repeated_ = 0;
};

}  // namespace echelon
