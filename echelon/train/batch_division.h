// How a batch is divided among data-parallel ranks by their measured speed.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "echelon/layout/mesh.h"
#include "echelon/timeline/rebalance.h"

namespace echelon {

/// What a rank works in a step, from some of them: one pause does not count. A
/// core that is limited to a share stands still in some steps and computes at
/// full speed in the others, so a median would not do.
double mean_without_largest(const std::vector<double>& seconds);

/// The samples of a full batch that each data-parallel rank takes.
///
/// Watches how long ranks work in steps with full batches. After some of them
/// it proposes the division with which the slowest works the least, each rank's
/// time being in proportion to its samples, where that is kLeastGain less than
/// now. A rank's time is the mean of these steps without the longest, so that
/// one pause does not count. The first kUnusualSteps of a process and after a
/// change are left out: memory is allocated then.
///
/// All ranks of the world keep one, and give it the same numbers in the same
/// order: then all decide alike.
class BatchDivision {
 public:
  static constexpr double kLeastGain = 0.05;  // of what the slowest works
  static constexpr int64_t kUnusualSteps = 2;

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
  void measure_anew();

  /// Replaces the division, as when a run is resumed, unless it does not fit
  /// this batch, these ranks or this unit. Returns whether it was replaced.
  bool resume(const std::vector<int64_t>& samples);

 private:
  std::vector<int64_t> data_index_;  // by rank of the world
  std::vector<int64_t> samples_;
  int64_t unit_;
  int64_t every_;
  int64_t unusual_ = kUnusualSteps;        // steps that are still left out
  std::vector<std::vector<double>> work_;  // by data-parallel rank, step
};

}  // namespace echelon
