// What a rank computes before the trainer's code comes again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "echelon/bench/bench_meter.h"

namespace echelon {

/// Computes something else for a while, always as long: behind it caches and
/// branch predictors know the trainer's code as little as behind a larger
/// network's layers.
class Elsewhere {
 public:
  /// Collective. One place for each number of samples, of a pass that takes so
  /// long; with none, no time is spent there.
  Elsewhere(BenchMeter& meter, const std::vector<int64_t>& samples);

  /// The first one until then.
  void choose(size_t place) { chosen_ = place; }
  double seconds(size_t place) const { return places_[place].seconds; }
  void spend() const;

 private:
  struct Place {
    std::function<void()> pass;
    double seconds = 0;
  };
  std::vector<Place> places_;
  size_t chosen_ = 0;
};

}  // namespace echelon
