// How a pipeline's layers are cut into stages again by the measured speed of
// its ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "echelon/layout/mesh.h"
#include "echelon/layout/partition.h"
#include "echelon/schedule/schedule.h"
#include "echelon/timeline/rebalance.h"
#include "echelon/train/work_times.h"

namespace echelon {

/// What stages are cut by.
struct StageWork {
  std::vector<size_t> boundaries;  // the cut now
  std::vector<double> layers;      // the work of each, in any unit
  SliceMemory memory;              // of stages
};

/// The cut of a pipeline's layers into stages.
///
/// Watches how long ranks work in full steps, as BatchDivision does. A pipeline
/// rank has done the work of its layers in the time of the slowest device in
/// its place in any pipeline; that is its speed. After some steps it proposes
/// the cut with which the slowest works the least, where
///
///   - that is kLeastGain less than now, and
///   - the time that it saves, in the steps that are left but at most in
///     kRepaySeconds, is more than a change of the cut costs.
///
/// The work of layers is known roughly. So a cut that did not bring kLeastGain
/// is followed by twice as many steps before the next one, and that again:
/// however wrong, changes become rare.
///
/// All ranks of the world keep one, and give it the same numbers in the same
/// order: then all decide alike.
class StageCuts {
 public:
  static constexpr double kLeastGain = 0.05;    // of what the slowest works
  static constexpr double kRepaySeconds = 600;  // as for hosts that come

  ///   every  steps that are measured before a decision, 1 or more
  StageCuts(
      const Mesh& mesh, const Schedule& schedule, StageWork work,
      int64_t every);

  /// A step with a full batch has ended.
  ///
  ///   seconds     by rank of the world: worked, without waits for others
  ///   steps_left  in the run
  ///   cost        of a change, in seconds
  ///
  /// Returns a change, for which boundaries() has the new cut. Nothing is
  /// changed until changed() is called.
  std::optional<timeline::Rebalance> after_step(
      int64_t step, const std::vector<double>& seconds, int64_t steps_left,
      double cost);

  /// The cut that after_step() has returned is in use.
  void changed();
  /// What was measured so far is of no use: the batch was divided anew.
  void measure_anew() { times_.measure_anew(); }

  /// Of the change that after_step() returned last.
  const std::vector<size_t>& boundaries() const { return next_; }

 private:
  std::vector<double> work_of_ranks(const std::vector<size_t>& cut) const;

  std::vector<int32_t> rank_of_stage_;
  size_t num_ranks_;  // of a pipeline
  StageWork work_;
  std::vector<size_t> next_;
  int64_t every_;
  WorkTimes times_;       // by pipeline rank
  int64_t patience_ = 1;  // times `every_`
  double asked_ = 0;    // how long the slowest worked, before the last proposal
  double slowest_ = 0;  // the same of a change that has not been judged yet; 0:
                        // there is none
};

}  // namespace echelon
