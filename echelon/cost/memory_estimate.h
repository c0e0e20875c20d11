// Memory of a rank by kind, from formulas alone.
// Sources: Rajbhandari et al., 2020, arXiv:1910.02054; Korthikanti et al.,
// 2022, arXiv:2205.05198.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/cluster/device.h"
#include "echelon/cost/model_shape.h"
#include "echelon/cost/strategy.h"
#include "echelon/timeline/memory_kind.h"

namespace echelon {

struct PipelineShape {
  std::string schedule = "1f1b";
  int64_t ranks = 1;            // p
  int64_t stages_per_rank = 1;  // v
  int64_t microbatches = 1;     // m
};

/// The stages of a rank, first to last: interleaved, or down and up a V.
std::vector<int64_t> stages_of_rank(const PipelineShape& shape, int64_t rank);

/// How many microbatches wait for their backward, by formula: what
/// schedule/memory.h counts, without making the schedule. By stages_of_rank, at
/// the rank's fullest moment. They sum to stored_activations().ranks; for zb-v
/// and dualpipev with fewer than 2p microbatches, to at most two more than
/// that.
std::vector<double>
stored_microbatches(const PipelineShape& shape, int64_t rank);

struct MemoryEstimate {
  std::vector<MemoryByKind> ranks;  // by pipeline rank, at the fullest moment
  /// Of each rank in addition: context, libraries, fragments.
  double reserved_bytes = 0;
  double host_bytes = 0;  // of each rank: offloaded
  /// By pipeline rank, what a job may use of its device; empty: not known.
  std::vector<double> limits;

  double limit(size_t rank) const;  // 0: not known
  double bytes(size_t rank) const;  // with reserved_bytes
  /// Of the fullest, with reserved_bytes.
  double peak_bytes() const;
  /// The rank with the largest share of its limit.
  int fullest() const;
  /// That rank's bytes over its limit; its bytes where limits are not known.
  double fullness() const;

 private:
  double share(size_t rank) const;
};

MemoryEstimate
estimate_memory(const ModelShape& model, const Strategy& strategy);

/// A quick lower bound: weights, gradients and optimizer state of the fullest
/// rank. A strategy whose bound exceeds the device memory cannot fit.
double least_bytes(const ModelShape& model, const Strategy& strategy);

/// What a job may use of a device.
double usable_bytes(const Device& device);

}  // namespace echelon
