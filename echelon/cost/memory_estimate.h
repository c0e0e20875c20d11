// Memory of a rank by kind, from formulas alone.
// Sources: Rajbhandari et al., 2020, arXiv:1910.02054; Korthikanti et al.,
// 2022, arXiv:2205.05198.
#pragma once

#include <vector>

#include "echelon/cluster/cluster.h"
#include "echelon/cost/model_shape.h"
#include "echelon/cost/strategy.h"
#include "echelon/timeline/memory_kind.h"

namespace echelon {

struct MemoryEstimate {
  std::vector<MemoryByKind> ranks;  // by pipeline rank, at the fullest moment
  double reserved_bytes =
      0;                  // of each rank beside: context, libraries, fragments
  double host_bytes = 0;  // of each rank: offloaded
  /// By pipeline rank, what a job may use of its device; empty: not known.
  std::vector<double> limits;

  double limit(size_t rank) const;  // 0: not known
  double bytes(size_t rank) const;  // with reserved_bytes
  /// Of the fullest, with reserved_bytes.
  double peak_bytes() const;
  /// The one with the largest part of its limit.
  int fullest() const;
  /// Bytes of that one over its limit; bytes where limits are not known.
  double fullness() const;
};

MemoryEstimate estimate_memory(
    const ModelShape& model, const Strategy& strategy, const Cluster& cluster);

/// A lower bound that is quick: weights, gradients and optimizer state of the
/// fullest rank. What is above the device's memory by it cannot fit.
double least_bytes(const ModelShape& model, const Strategy& strategy);

/// What a job may use of a device.
double usable_bytes(const Device& device);

}  // namespace echelon
