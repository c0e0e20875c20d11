// How long ranks work in a step, from several of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace echelon {

/// Ranks of the world are in places, such as the stages of a pipeline; what is
/// measured of a place is its slowest rank, for which the others wait. A time
/// is the mean of several steps without the longest: one pause does not count,
/// and a core that is limited to a share, which stands still in some steps and
/// computes at full speed in the others, has no median.
class WorkTimes {
 public:
  /// The first steps of a process and after a change are left out: memory is
  /// allocated then.
  static constexpr int64_t kUnusualSteps = 2;

  ///   places  of each rank of the world, from 0
  WorkTimes(std::vector<int64_t> places, size_t num_places);

  /// A step has ended, in which each rank of the world worked for so many
  /// `seconds`. Returns the times by place when `steps` were measured, and then
  /// begins anew.
  std::optional<std::vector<double>>
  after_step(const std::vector<double>& seconds, int64_t steps);

  /// What was measured so far is of no use: the ranks' work has changed.
  void measure_anew();

 private:
  std::vector<int64_t> places_;
  std::vector<std::vector<double>> seconds_;  // by place, step
  int64_t unusual_ = kUnusualSteps;           // steps that are still left out
};

}  // namespace echelon
