// How a batch is divided among data-parallel ranks by their measured speed.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "echelon/layout/mesh.h"
#include "echelon/timeline/rebalance.h"
#include "echelon/train/work_times.h"

namespace echelon {

/// The samples of a full batch that each data-parallel rank takes.
///
/// Watches how long ranks work in steps with full batches. After some of them
/// it proposes the division with which the slowest works the least, each rank's
/// time being in proportion to its samples, where that is kLeastGain less than
/// now.
///
/// All ranks of the world keep one, and give it the same numbers in the same
/// order: then all decide alike.
class BatchDivision {
 public:
  static constexpr double kLeastGain = 0.05;  // of what the slowest works

  /// A rank's samples are a multiple of `unit`, at least one: what its passes
  /// divide it by.
  ///
  ///   samples  by data-parallel rank, multiples of `unit`
  ///   every    steps that are measured before each decision, 1 or more
  BatchDivision(
      const Mesh& mesh, std::vector<int64_t> samples, int64_t unit,
      int64_t every);

  const std::vector<int64_t>& samples() const { return samples_; }

  /// A step with a full batch has ended.
  ///
  ///   work  by rank of the world: seconds without waits for other ranks
  ///
  /// Returns a change, which begins with the next step; samples() has it.
  std::optional<timeline::Rebalance>
  after_step(int64_t step, const std::vector<double>& work);

  /// What was measured so far is of no use: stages are cut anew.
  void measure_anew() { times_.measure_anew(); }

  /// Replaces the division, as when a run is resumed, unless it does not fit
  /// this batch, these ranks or this unit. Returns whether it was replaced.
  bool resume(const std::vector<int64_t>& samples);

 private:
  std::vector<int64_t> samples_;
  int64_t unit_;
  int64_t every_;
  WorkTimes times_;  // by data-parallel rank
};

}  // namespace echelon
